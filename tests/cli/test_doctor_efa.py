"""EFA devices of an invented machine, and plugins that load or do not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvferry.cli.doctor import devices
from kvferry.cli.doctor.devices import Machine, check_efa, efa_devices, load_error, plugins
from kvferry.cli.doctor.findings import Finding, Mark

MISSING = "libfabric.so.1: cannot open shared object file: No such file or directory"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One EFA device and one of Mellanox."""
    for device, driver in (("rdmap16s27", "efa"), ("mlx5_0", "mlx5_core")):
        drivers = tmp_path / "sys/bus/pci/drivers" / driver
        drivers.mkdir(parents=True)
        folder = tmp_path / "sys/class/infiniband" / device / "device"
        folder.mkdir(parents=True)
        (folder / "driver").symlink_to(drivers)
    return Machine(root=tmp_path)


def judged(machine: Machine, monkeypatch: pytest.MonkeyPatch, **errors: str) -> Finding:
    """The finding when the plugin of each build loads with this error."""
    monkeypatch.setattr(devices, "plugins", lambda: {name: Path(name) for name in errors})
    monkeypatch.setattr(devices, "load_error", lambda plugin, _: errors[plugin.name])
    (found,) = check_efa(machine)
    return found


def test_devices_are_told_by_their_driver(machine: Machine) -> None:
    assert efa_devices(machine) == ["rdmap16s27"]
    assert efa_devices(Machine(root=machine.root / "nothing")) == []


def test_with_a_device_a_missing_library_is_named_and_breaks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judged(machine, monkeypatch, nixl_cu13=MISSING)
    assert found.mark is Mark.BROKEN
    assert "rdmap16s27" in found.found
    assert MISSING in found.found
    assert "libfabric" in found.do
    assert judged(machine, monkeypatch).mark is Mark.BROKEN


def test_with_a_device_and_one_plugin_that_loads_the_key_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judged(machine, monkeypatch, nixl_cu12=MISSING, nixl_cu13="")
    assert (found.mark, '"backends": ["LIBFABRIC"]' in found.do) == (Mark.LOOK, True)


def test_without_a_device_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "load_error", lambda *_: pytest.fail("it is loaded"))
    assert [one.mark for one in check_efa(Machine(root=Path("/nowhere")))] == [Mark.OK]


def test_the_plugin_of_the_installed_nixl_is_found_and_the_loaders_error_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_LOAD", devices._LOAD.replace(", torch", ""))  # seconds each time
    assert {path.name for path in plugins().values()} == {"libplugin_LIBFABRIC.so"}
    assert all(path.is_file() for path in plugins().values())
    last = list(plugins().values())[-1]
    assert "libnixl" not in load_error(last, Machine()), "NIXL's own libraries are found"
    source, plugin = tmp_path / "empty.c", tmp_path / "plugin.so"
    source.write_text("")
    compiled = subprocess.run(
        ["cc", "-shared", "-o", plugin, source], capture_output=True, check=False
    )
    assert compiled.returncode == 0
    assert load_error(plugin, Machine()) == ""
    assert "cannot open shared object file" in load_error(tmp_path / "none.so", Machine())
