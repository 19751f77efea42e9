"""The grammar of the short form: the values of valid texts, and the errors of invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.plan.short_form import (
    KEYS,
    MAX_LENGTH,
    ConvPart,
    ShortForm,
    even_stages,
)
from tests.cli.plan.forms import read_form

ATTENTION = "layers=32,heads=8,dim=128"


def test_the_example_of_the_documentation_is_read_as_it_says() -> None:
    form = read_form(
        "layers=32,heads=8,dim=128,tp=4,pp=2,block=16,layout=NHD,dtype=bfloat16"
    )
    assert form == ShortForm(
        layers=32,
        heads=8,
        dim=128,
        tp=4,
        pp=2,
        stages=(16, 16),
        block=16,
        kernel_block=16,
        interleave=16,
        layout="NHD",
        dtype="bfloat16",
        state_dtype="bfloat16",
    )


def test_the_split_is_vllms_own() -> None:
    utils = pytest.importorskip("vllm.distributed.utils")
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            spans = [utils.get_pp_indices(layers, rank, pp) for rank in range(pp)]
            sizes = tuple(stop - start for start, stop in spans)
            assert even_stages(layers, pp) == sizes, (layers, pp)


@pytest.mark.parametrize(
    ("listed", "layers"),
    [
        ("*", (0, 1, 2, 3, 4, 5)),
        ("0", (0,)),
        ("0-2", (0, 1, 2)),
        ("0-5/2", (0, 2, 4)),
        ("5+1-4/3", (1, 4, 5)),
        ("2+2", (2,)),
    ],
)
def test_a_list_of_layers_has_single_ones_ranges_and_steps(
    listed: str, layers: tuple[int, ...]
) -> None:
    form = read_form(f"layers=6,heads=2,dim=8,window=32@{listed}")
    assert (form.window, form.window_layers) == (32, layers)
    assert form.full_layers == tuple(sorted(set(range(6)) - set(layers)))


def test_states_have_heads_with_a_shape_and_named_channels() -> None:
    states = "state_layers=0+2,ssm=24x64x128,conv=1536+B128*,state_dtype=float32"
    form = read_form(f"layers=3,heads=2,dim=8,{states}")
    assert form.ssm == (24, 64, 128)
    assert form.conv == (ConvPart("x", 1536, False), ConvPart("B", 128, True))
    assert (form.state_layers, form.full_layers) == ((0, 2), (1,))
    assert form.state_dtype == "float32"


WRONG = {
    "": "pair is ''",
    "layers": "pair is 'layers'",
    f"{ATTENTION},": "pair is ''",
    f"{ATTENTION},colour=3": "key is 'colour'; expected one of layers,",
    f"{ATTENTION},head=3": "key is 'head'; did you mean heads?",
    f"{ATTENTION},tp=2,tp=2": "tp is '2'; expected each key once",
    "heads=8,dim=128": "layers is missing; expected the number of layers",
    "layers=32": "heads is missing; expected heads and dim of the attention, or mla",
    f"{ATTENTION},tp=0": "tp is '0'; expected a whole number from 1 to 4096",
    f"{ATTENTION},tp=٣": "tp is '٣'",
    f"{ATTENTION},dtype=float61": "dtype is 'float61'; did you mean float16? one of bfloat16,",
    f"{ATTENTION},layout=NDH": "layout is 'NDH'; did you mean NHD? one of HND, NHD, LBHNC,",
    f"{ATTENTION},pp=33": "pp is '33'; expected at most layers=32",
    f"{ATTENTION},stages=20+11": "stages is '20+11'; expected sizes that add up to layers=32",
    f"{ATTENTION},stages=70000": "stages is '70000'; expected sizes up to 65536",
    f"{ATTENTION},stages=16+16,pp=2": "pp is '2'; expected no pp beside stages",
    "layers=2,mla=576,heads=8": "heads is '8'; expected no heads beside mla",
    "layers=2,mla=576,kv=apart": "kv is 'apart'; expected no kv beside mla",
    "layers=2,mla=576,layout=CPU": "layout is 'CPU'; expected another layout with mla",
    f"{ATTENTION},layout=CPU,kv=apart": "kv is 'apart'; expected no kv with layout=CPU",
    f"{ATTENTION},block=16,kernel_block=12": "kernel_block is '12'; expected a divisor of block=16",
    f"{ATTENTION},interleave=4": "interleave is '4'; expected dcp above 1 with it",
    f"{ATTENTION},tp=4,dcp=2,interleave=12": "interleave is '12'; expected a divisor of block=16",
    f"{ATTENTION},tp=4,dcp=3": "dcp is '3'; expected a divisor of pcp·tp=4",
    f"{ATTENTION},tp=3,pcp=2,dcp=3": "dcp is '3'; expected a divisor or a multiple of pcp=2",
    f"{ATTENTION},tp=4096,pp=2": "tp is '4096'; expected at most 4096 ranks; pp·pcp·tp is 8192",
    f"{ATTENTION},window=4@": "window is ''; expected layers joined by +",
    f"{ATTENTION},window=4@32": "window is '32'; expected layers from 0 to 31",
    f"{ATTENTION},window=4@5-2": "window is '5-2'; expected layers from 0 to 31, the lower one first",
    f"{ATTENTION},window=4@0,state_layers=0,ssm=2x2": "state_layers is '0'; expected layers that are not in the list",
    f"{ATTENTION},state_layers=0": "state_layers is '0'; expected ssm or conv with it",
    f"{ATTENTION},ssm=2x2": "ssm is '2x2'; expected state_layers with it",
    f"{ATTENTION},conv_width=4": "conv_width is '4'; expected conv with it",
    f"{ATTENTION},state_layers=0,ssm=4": "ssm is '4'; expected heads and their shape",
    f"{ATTENTION},state_layers=0,conv=x": "conv is 'x'; expected names with channels",
    f"{ATTENTION},state_layers=0,conv=x2+x3": "conv is 'x2+x3'; expected a name of its own",
    "layers=2,heads=8,state_layers=*,ssm=2x2": "heads is '8'; expected a layer with attention",
    "layers=2,kv=apart,state_layers=*,ssm=2x2": "kv is 'apart'; expected a layer with attention",
    "layers=2,kv=packed,state_layers=0-1,ssm=2x2": "kv is 'packed'; expected a layer with attention",
    f"{ATTENTION},names=layers": "names is 'layers'; expected a name with {}",
    f"{ATTENTION},names={{0.__class__}}": "names is '{0.__class__}'",
    "x" * (MAX_LENGTH + 1): "text is 4097 characters",
}


@pytest.mark.parametrize(("text", "said"), WRONG.items(), ids=range(len(WRONG)))
def test_an_invalid_short_form_is_refused_with_key_value_and_accepted_values(
    text: str, said: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_form(text)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 600


PIECES = [*KEYS, *"=,+-/@*x017 \n\0é", "{}", "99999999999999"]
VALID = {"layers": "4", "heads": "2", "dim": "8", "state_layers": "0", "conv": "x2"}


def with_value(key: str, value: str) -> str:
    return ",".join(f"{key}={value}" for key, value in {**VALID, key: value}.items())


@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(st.sampled_from(PIECES), max_size=24).map("".join),
        st.builds(with_value, st.sampled_from([*KEYS]), st.text(max_size=30)),
    )
)
def test_no_text_raises_any_other_error(text: str) -> None:
    field = ""
    try:
        form = read_form(text)
        assert sum(form.stages) == form.layers
    except InvalidArgument as refused:
        field = refused.field
    assert field in {*KEYS, "pair", "key", ""}
