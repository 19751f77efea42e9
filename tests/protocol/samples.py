"""Valid messages for tests to start from: one of each, every field with a value that is not its default."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.protocol.digests import CHUNK_TOKENS
from kvferry.protocol.geometry import Format, PagedTensor, Place, Range, Topology
from kvferry.protocol.handshake import (
    CacheGroup,
    DeviceAllocation,
    EngineDescription,
    Hello,
    LeaseName,
    LeaseTableAddress,
    ModelFacts,
    Refused,
    Release,
    Renew,
    SharedAllocation,
    SharedMemory,
    WorkerDescription,
)
from kvferry.protocol.orders import (
    LeaseEnd,
    LeaseHold,
    LeaseOpen,
    LoadOrder,
    Prewarm,
    StepOrders,
)
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.queries import (
    Answer,
    Answers,
    FindPrefixes,
    PrefixQuery,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
    encode_params,
)
from kvferry.protocol.slots import Done

KEY = bytes(range(32))
BOOT = "0123456789abcdef" * 2
EPOCH = "00f00ba40000001"


def make_ticket(**changes: Any) -> Ticket:
    """A ticket for 300 tokens."""
    ticket = Ticket(
        version=1,
        boot=BOOT,
        lease_slot=7,
        lease_epoch=EPOCH,
        lease_s=30.0,
        digests=("a1" * 16, "b2" * 16),
        mac="0" * 64,
    )
    return msgspec.structs.replace(ticket, **changes)


def make_params(*, ticket: Ticket | None = None, **changes: Any) -> RemotePrefill:
    """Params for 300 tokens in two cache groups."""
    params = RemotePrefill(
        remote_engine_id="prefill-0",
        remote_request_id="cmpl-1-0-9f3a",
        remote_block_ids=((4, 9, 2), (17,)),
        remote_host="10.0.0.1",
        remote_port=5600,
        tp_size=4,
        pp_size=2,
        dcp_size=2,
        remote_num_tokens=300,
        kvferry=ticket or make_ticket(),
    )
    return msgspec.structs.replace(params, **changes)


def params_of_length(tokens: int, **changes: Any) -> RemotePrefill:
    """Params for any number of tokens, with as many digests as they need."""
    digests = tuple(f"{index:032x}" for index in range(-(-tokens // CHUNK_TOKENS)))
    return make_params(
        ticket=make_ticket(digests=digests), remote_num_tokens=tokens, **changes
    )


def make_tensor(**changes: Any) -> PagedTensor:
    """K and V of one layer, two of eight heads, 16 tokens a block."""
    tensor = PagedTensor(
        layer="model.layers.0.self_attn",
        kind="kv",
        group=1,
        base=0x7F00_0000_0000,
        blocks=1000,
        block_tokens=16,
        block_stride=2 * 16 * 256,
        heads=Range(start=2, stop=4),
        head_stride=16 * 256,
        tile_tokens=1,
        tile_stride=256,
        cell_bytes=256,
        format=Format(dtype="bfloat16", quantization="fp8", packing="k|v"),
    )
    return msgspec.structs.replace(tensor, **changes)


def make_worker(**changes: Any) -> WorkerDescription:
    """Worker tp1/pp1 with one tensor."""
    worker = WorkerDescription(
        place=Place(pp=1, pcp=2, tp=1, dcp=3),
        agent="prefill-0/tp1",
        agent_metadata=b"\x00nixl\xff",
        memory="VRAM",
        device=1,
        lease_table=LeaseTableAddress(address=0x7FFF_FFFF_F000, slots=1024),
        tensors=(make_tensor(),),
        shared=SharedMemory(
            machine="8f3c",
            pid_namespace="pid:[4026531836]",
            pid=17,
            allocations=(
                SharedAllocation(
                    address=0x7FFF_0000_0000, num_bytes=8192, fd=9, name="5" * 32
                ),
            ),
            device_allocations=(make_device_allocation(),),
            device_proof=make_device_allocation(num_bytes=16),
        ),
    )
    return msgspec.structs.replace(worker, **changes)


def make_device_allocation(**changes: Any) -> DeviceAllocation:
    """Memory of a device that CUDA IPC can open."""
    allocation = DeviceAllocation(
        address=0x7F00_0000_1000,
        num_bytes=1 << 20,
        offset=0x1000,
        allocation_bytes=2 << 20,
        handle=bytes(range(64)),
        generation=3,
        device="a" * 32,
    )
    return msgspec.structs.replace(allocation, **changes)


def make_description(**changes: Any) -> EngineDescription:
    """An engine of one worker."""
    description = EngineDescription(
        engine_id="prefill-0",
        boot=BOOT,
        mac_key=KEY,
        facts=ModelFacts(
            model="smollm2",
            fingerprint="f" * 32,
            dtype="bfloat16",
            cache_dtype="auto",
            quantization="none",
            max_model_tokens=2048,
            speculative="eagle-3",
        ),
        topology=Topology(pp=2, pcp=3, tp=4, dcp=5),
        groups=(CacheGroup(policy="window", block_tokens=16, window_tokens=4096),),
        workers=(make_worker(),),
    )
    return msgspec.structs.replace(description, **changes)


def make_orders(request_id: str = "cmpl-1") -> StepOrders:
    """A step's orders with one of everything."""
    params = make_params()
    return StepOrders(
        boot=BOOT,
        ends=(LeaseEnd(request_id=request_id, slot=1, epoch=EPOCH),),
        opens=(LeaseOpen(slot=2, epoch=EPOCH),),
        holds=(
            LeaseHold(request_id=request_id, slot=3, epoch=EPOCH, blocks=((1, 2), ())),
        ),
        loads=(
            LoadOrder(
                request_id=request_id,
                source=params,
                local_blocks=((5, 6, 7), ()),
                first_token=0,
                stop_token=300,
            ),
        ),
        prewarms=(Prewarm.from_params(params),),
    )


DONE = Done(slot=7, epoch=EPOCH, consumer=BOOT, worker=3, expected=4)
HELLO = Hello(engine_id="prefill-0", client_id="decode-3")
LEASES = (LeaseName(slot=7, epoch=EPOCH), LeaseName(slot=8, epoch="f" * 15))
REQUESTS: tuple[Hello | Renew | Release, ...] = (
    HELLO,
    Renew(boot=BOOT, leases=LEASES),
    Release(boot=BOOT, leases=LEASES[:1]),
)
QUESTIONS = tuple(
    PromptQuery(number=n, key=f"cmpl-{n}", num_tokens=300, digest="ab" * 16)
    for n in (5, 6)
)
PREFIX_QUERIES = (
    PrefixQuery(number=7, chain=bytes(range(48)), min_tokens=512),
    PrefixQuery(number=8, chain=bytes(range(16)), min_tokens=2),
)
ASKS: tuple[Subscribe | Unsubscribe | FindPrefixes, ...] = (
    Subscribe(client_id="decode-3", queries=QUESTIONS),
    Unsubscribe(client_id="decode-3", numbers=(5, 6)),
    FindPrefixes(client_id="decode-3", queries=PREFIX_QUERIES),
)
ANSWERS = Answers(
    answers=(
        Answer(
            number=5,
            progress=PromptProgress.TICKET,
            params=encode_params(
                make_params(ticket=make_ticket(opens_within_s=10.0)).to_json()
            ),
            cached_tokens=256,
        ),
        Answer(number=6, progress=PromptProgress.OVER, reason="no_lease"),
    ),
    siblings=(5601, 5602),
)
REPLIES: tuple[EngineDescription | Refused, ...] = (
    make_description(),
    Refused(field="version", value="2", expected="1"),
)
