"""`kvstore doctor`: every check looks for itself and says what it saw; hardware that is not here is a tree of files, as sysfs shows it."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_tool import Cli

from kvstore.client.movers import devices
from kvstore.client.movers.libcuda import Gpu
from kvstore.doctor import disk, gpu, host, memory, rdma
from kvstore.doctor.finding import Word

CHECKS = {
    "rdma", "memlock", "huge pages", "gpu", "gpudirect", "locality", "erasure", "io_uring", "data", "clock", "time sync", "tcp", "files",
    "movers",
}  # fmt: skip
H200 = Gpu(0, "H200", "0000:1b:00.0", 141 << 30, rdma=True, dma_buf=True, writes_ordered=True, flushes=True)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def nic(root: Path, *, pci: str = "", state: str = "4: ACTIVE", v2: bool = True, device_file: bool = True, name: str = "mlx5_0") -> None:
    """One RDMA device of one port, as the kernel lays it out; at a PCI address where that is given and `functions` made it."""
    folder = root / "sys/class/infiniband" / name
    write(folder / "fw_ver", "28.42.1000")
    port = folder / "ports/1"
    write(port / "state", state)
    write(port / "link_layer", "Ethernet")
    write(port / "rate", "400 Gb/sec (4X NDR)")
    gids = [("fe80:0000:0000:0000:5aa2:e1ff:fe00:0001", "IB/RoCE v1")]
    if v2:
        gids += [(devices.NIL_GID, ""), ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2")]
    for index, (gid, kind) in enumerate(gids):
        write(port / f"gids/{index}", gid)
        if kind:
            write(port / f"gid_attrs/types/{index}", kind)
            write(port / f"gid_attrs/ndevs/{index}", "eth1")
    write(root / "sys/class/net/eth1/mtu", "4200")
    if device_file:
        write(root / "sys/class/infiniband_verbs/uverbs0/ibdev", name)
        write(root / "dev/infiniband/uverbs0", "")
    if pci:
        (folder / "device").symlink_to((root / "sys/bus/pci/devices" / pci).resolve())


def test_a_port_or_gid_that_no_kernel_should_name_so_stops_nothing(tmp_path: Path) -> None:
    nic(tmp_path)
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1foo/state", "4: ACTIVE")
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/gids/2", "0000:0000:0000:0000:0000:ffff:0a4d:zz")
    (device,) = devices.rdma_devices(tmp_path)
    assert [port.number for port in device.ports] == [1]
    assert "0a4d:zz" in rdma._judged(device).found


def functions(root: Path, **places: str) -> None:
    """PCI functions: address (with _ for : and .) -> the bridges above it, below sys/devices; and their NUMA node after @."""
    for short, above in places.items():
        address = f"0000:{short[1:3]}:00.0"
        bridges, _, node = above.partition("@")
        real = root / "sys/devices" / bridges / address
        write(real / "numa_node", node or "0")
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_every_check_runs_and_says_what_it_saw(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    ran = cli.run("doctor", "--data", data, "--pinned", "1MiB", "--json")
    told = ran.json
    assert told["schema"] == "kvstore.doctor/1" and told["error"] is None
    checks = told["data"]["checks"]
    assert {check["check"] for check in checks} >= CHECKS | {"O_DIRECT", "holes", "fsync"}
    assert all(check["result"] in ("ok", "warn", "bad", "skip") and check["found"] for check in checks)
    assert all(check["fix"] for check in checks if check["result"] in ("warn", "bad"))
    bad = [check for check in checks if check["result"] == "bad"]
    assert ran.code == int(bool(bad)) and told["ok"] is not bool(bad)
    assert told["data"]["counts"]["bad"] == len(bad)
    assert list(data.iterdir()) == []  # nothing is left behind


def test_a_person_reads_a_line_a_check_and_what_to_do(cli: Cli) -> None:
    ran = cli.run("doctor")
    assert ran.stdout.startswith("host ") and "Nothing was changed." in ran.stdout
    assert "skip  data       no directory was named: --data DIR" in ran.stdout
    assert ran.stderr == ""


def test_warnings_count_only_where_asked_and_a_directory_that_is_not_there_is_bad(cli: Cli, tmp_path: Path) -> None:
    ran = cli.run("doctor", "--data", tmp_path / "nowhere", "--json")
    assert ran.code == 1
    (line,) = (check for check in ran.json["data"]["checks"] if check["check"] == "data")
    assert line["result"] == "bad" and "no such file" in line["found"]
    cli.run("doctor", "--pinned", "many").refused(2, "E102", "many")


def test_movers_are_measured_and_the_choice_can_be_taken_over(cli: Cli) -> None:
    ran = cli.run("doctor", "--measure")
    assert "cpu: " in ran.stdout and " of a plain copy" in ran.stdout and "; chosen" in ran.stdout
    assert 'choose it with: mover = "' in ran.stdout
    assert "skip  movers     cuda: pages are in host RAM" in ran.stdout or "cuda: 0" not in ran.stdout


def test_settings_are_shown_with_their_origin(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / ".config/kvstore/config.toml", 'capacity = "6GB"')
    ran = cli.run("doctor", "--settings", "--json", KVSTORE_TIMEOUT="7s")
    assert ran.code == 0
    assert ran.json["data"]["timeout"] == {"value": 7.0, "origin": "KVSTORE_TIMEOUT"}
    assert ran.json["data"]["capacity"]["value"] == 6_000_000_000 and "config.toml:1" in ran.json["data"]["capacity"]["origin"]
    assert ran.json["data"]["color"]["origin"] == "default"


# --- RDMA ---


def test_a_device_is_told_with_port_mtu_and_its_first_roce_v2_gid(tmp_path: Path) -> None:
    functions(tmp_path, _1a="pci0000:00/0000:00:01.0")
    nic(tmp_path, pci="0000:1a:00.0")
    (device,) = devices.rdma_devices(tmp_path)
    assert (device.pci, device.firmware) == ("0000:1a:00.0", "28.42.1000")
    assert device.node_file == "/dev/infiniband/uverbs0" and device.node_usable
    (port,) = device.ports
    assert port.active and port.usable and port.mtu_bytes == 4200
    assert [gid.index for gid in port.gids] == [0, 2]  # the empty one between is none
    judged = rdma._judged(device)
    assert judged.word is Word.OK and "RoCE v2 GID 2 10.77.0.1" in judged.found and "400 Gb/sec" in judged.found


@pytest.mark.parametrize(
    ("change", "word", "said"),
    [
        ({"state": "1: DOWN"}, Word.WARN, "no port is up"),
        ({"v2": False}, Word.WARN, "no RoCE v2 GID"),
        ({"device_file": False}, Word.BAD, "modprobe ib_uverbs"),
    ],
)
def test_what_a_device_lacks_is_said(tmp_path: Path, change: dict[str, object], word: Word, said: str) -> None:
    nic(tmp_path, **change)  # type: ignore[arg-type]  # one keyword a case
    judged = rdma._judged(devices.rdma_devices(tmp_path)[0])
    assert judged.word is word and said in judged.fix


def test_a_host_without_devices_is_fine_and_goes_by_tcp(tmp_path: Path) -> None:
    (finding,) = rdma.rdma(tmp_path)
    assert finding.word is Word.OK and "TCP" in finding.found


# --- GPU ---


@pytest.mark.parametrize(
    ("dma_buf", "library", "module", "chosen"),
    [
        (True, True, "nvidia_peermem", "dma-buf"),
        (True, False, "nvidia_peermem", "nvidia-peermem"),
        (False, True, "nvidia_peermem", "nvidia-peermem"),
        (True, False, "", "none"),
        (False, True, "", "none"),
    ],
)
def test_registration_is_chosen_by_what_the_machine_offers(dma_buf: bool, library: bool, module: str, chosen: str) -> None:
    card = replace(H200, dma_buf=dma_buf)
    assert gpu.registration_of(card, library, module) == chosen
    assert gpu.registration_of(replace(card, writes_ordered=False), library, module) == chosen  # it can be flushed
    assert gpu.registration_of(replace(card, flushes=False), library, module) == chosen  # and need not be
    assert gpu.registration_of(replace(card, writes_ordered=False, flushes=False), library, module) == "none"
    assert gpu.registration_of(replace(card, rdma=False), library, module) == (chosen if chosen == "dma-buf" else "none")


@pytest.mark.parametrize(
    ("change", "said", "mend"),
    [
        ({"dma_buf": False, "rdma": False}, "the GPU lets no device in by address", "not every GPU lets a NIC in"),
        ({"dma_buf": False}, "nvidia-peermem is not loaded", "modprobe nvidia-peermem"),
        ({"writes_ordered": False, "flushes": False}, "need a flush before kernels see them, which the driver cannot", "update the driver"),
    ],
)
def test_a_gpu_that_no_nic_can_write_into_is_no_ok(tmp_path: Path, change: dict[str, bool], said: str, mend: str) -> None:
    """With nvidia-peermem loaded, a GPU without GPUDirect was."""
    nic(tmp_path)
    if "rdma" in change:
        (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    (finding,) = gpu.gpu_direct([replace(H200, **change)], devices.rdma_devices(tmp_path), tmp_path)
    assert finding.word is Word.WARN and said in finding.found and mend in finding.fix
    assert finding.measured["chosen"] == "none" and finding.measured["rdma"] is change.get("rdma", True)


def test_the_device_is_the_one_that_is_named_else_the_usable_one_nearest_to_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions(
        tmp_path,
        _1b="pci0000:00/0000:00:01.0",
        _1a="pci0000:80/0000:80:01.0@1",
        _2a="pci0000:00/0000:00:02.0",
        _3a="pci0000:00/0000:00:01.0",
    )
    nic(tmp_path, name="mlx5_0", pci="0000:1a:00.0")
    nic(tmp_path, name="mlx5_1", pci="0000:2a:00.0")
    nic(tmp_path, name="mlx5_2", pci="0000:3a:00.0", state="1: DOWN")
    here = devices.rdma_devices(tmp_path)
    near = devices.by_distance(H200.pci, here, tmp_path)
    assert near == [("PIX", "mlx5_2"), ("PHB", "mlx5_1"), ("SYS", "mlx5_0")]
    assert devices.nearest(H200.pci, here, tmp_path) == "mlx5_1"  # nothing comes through a port that is down
    assert devices.nearest(H200.pci, [], tmp_path) == "auto"
    monkeypatch.setattr(devices, "LibCuda", lambda: SimpleNamespace(gpu=[None, H200].__getitem__))
    assert devices.device_for("auto", "cuda:1", tmp_path) == "mlx5_1"
    assert devices.device_for("auto", "cpu", tmp_path) == "auto"
    monkeypatch.setenv("KVSTORE_RDMA_DEVICE", "mlx5_9")
    assert devices.device_for("auto", "cuda:1", tmp_path) == devices.device_for("auto", "cpu", tmp_path) == "mlx5_9"
    assert devices.device_for("mlx5_0", "cuda:1", tmp_path) == "mlx5_0"


def test_without_a_driver_for_the_gpu_the_first_device_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    nic(tmp_path)
    monkeypatch.setattr(devices, "LibCuda", absent)
    assert devices.device_for("auto", "cuda:0", tmp_path) == "auto"


@pytest.mark.parametrize(
    ("gids", "best"),
    [
        ([("fe80::1", "IB/RoCE v1"), ("fe80::1", "RoCE v2"), ("2001:db8::1", "RoCE v2"), ("::ffff:10.0.0.1", "RoCE v2")], 3),
        ([("fe80::1", "IB/RoCE v1"), ("fe80::1", "RoCE v2"), ("2001:db8::1", "RoCE v2")], 2),
        ([("fe80::1", "IB/RoCE v1"), ("fe80::1", "RoCE v2")], 1),
        ([("::ffff:10.0.0.1", "RoCE v2"), ("::ffff:10.0.0.2", "RoCE v2")], 0),
        ([("fe80::1", "IB/RoCE v1")], 0),
    ],
)
def test_of_a_ports_gids_the_best_is_in_use_unless_another_is_named(gids: list[tuple[str, str]], best: int) -> None:
    table = tuple(
        devices.Gid(index, ":".join(socket.inet_pton(socket.AF_INET6, gid)[at : at + 2].hex() for at in range(0, 16, 2)), kind, "eth1")
        for index, (gid, kind) in enumerate(gids)
    )
    port = devices.Port(1, "ACTIVE", "Ethernet", "400 Gb/sec", 4200, table)
    assert port.gid_in_use() == table[best]
    assert [port.gid_in_use(gid.index) for gid in table] == list(table)
    assert port.gid_in_use(len(table)) is None


def test_a_gid_index_that_a_device_does_not_have_is_said(tmp_path: Path) -> None:
    nic(tmp_path)
    (device,) = devices.rdma_devices(tmp_path)
    judged = rdma._judged(device, 7)
    assert judged.word is Word.WARN and "no GID 7" in judged.found and "rdma_gid_index is 7" in judged.fix
    assert rdma._judged(device, 0).word is Word.OK and "GID 0 fe80:" in rdma._judged(device, 0).found


@pytest.mark.parametrize(
    ("card", "other", "far"),
    [
        ("pci0000:00/0000:00:01.0/0000:19:00.0", "pci0000:00/0000:00:01.0/0000:19:00.0", "PIX"),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0", "PIX"),
        (
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:00.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0",
            "PXB",
        ),
        ("pci0000:00/0000:00:01.0", "pci0000:00/0000:00:03.0", "PHB"),
        ("pci0000:00/0000:00:01.0@1", "pci0000:80/0000:80:01.0@1", "NODE"),
        ("pci0000:00/0000:00:01.0@0", "pci0000:80/0000:80:01.0@1", "SYS"),
        ("pci0000:00/0000:00:01.0@-1", "pci0000:80/0000:80:01.0@-1", "?"),
    ],
)
def test_the_distance_of_two_functions_is_told_as_nvidia_smi_does(tmp_path: Path, card: str, other: str, far: str) -> None:
    functions(tmp_path, _1b=card, _1a=other)
    nic(tmp_path, pci="0000:1a:00.0")
    assert devices.distance("0000:1b:00.0", "0000:1a:00.0", tmp_path) == far
    (finding,) = gpu.locality([H200], devices.rdma_devices(tmp_path), tmp_path)
    assert f"mlx5_0 is nearest, {far} " in finding.found
    assert finding.word is (Word.WARN if far == "SYS" else Word.OK)


def test_nothing_is_claimed_of_gpus_and_nics_that_are_not_there(tmp_path: Path) -> None:
    assert [finding.word for finding in gpu.gpu_direct([], [])] == [Word.SKIP]
    assert [finding.word for finding in gpu.gpu_direct([H200], [], tmp_path)] == [Word.SKIP]
    assert [finding.word for finding in gpu.locality([H200], [], tmp_path)] == [Word.SKIP]
    write(tmp_path / "sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de")
    write(tmp_path / "sys/bus/pci/devices/0000:1b:00.0/class", "0x030200")
    assert gpu.nvidia_cards(tmp_path) == ["0000:1b:00.0"]
    finding = gpu._without_library(gpu.nvidia_cards(tmp_path), "")
    assert finding.word is Word.BAD and "libcuda.so.1" in finding.found
    assert gpu._without_library([], "").word is Word.OK
    assert gpu.peer_module(tmp_path) == ""
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert gpu.peer_module(tmp_path) == "nvidia_peermem"


# --- memory, disk, host ---


def test_locking_is_tried_and_not_read_from_the_limit() -> None:
    assert memory.lock_refusal(4096) == ""
    assert memory.lock_refusal(1 << 62) != ""
    assert memory.memlock(4096, rdma=True).word is Word.OK
    assert memory.memlock(1 << 62, rdma=True).word is Word.BAD
    plain = memory.memlock(1 << 62, rdma=False)
    assert plain.word is Word.WARN and "LimitMEMLOCK=infinity" in plain.fix


def test_memory_locked_beyond_the_limit_is_said_to_be_a_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "lock_refusal", lambda size_bytes: "")
    for limit, told in ((8192, True), (1 << 30, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert ("CAP_IPC_LOCK" in memory.memlock(1 << 20, rdma=True).found) == told


def test_huge_pages_given_are_told_by_the_kernel(tmp_path: Path) -> None:
    given = memory.transparent_bytes()
    assert given is None or 0 <= given <= 8 << 20
    write(tmp_path / "smaps", "7f0000000000-7f0000800000 rw-p 00000000 00:00 0\nSize: 8192 kB\nAnonHugePages:      4096 kB")
    assert memory._huge_at(tmp_path / "smaps", 0x7F0000001000) == 4 << 20
    assert memory._huge_at(tmp_path / "smaps", 0x10) is None


def test_the_filesystem_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    mounts = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw", "30 22 259:1 / /data rw shared:1 - xfs /dev/nvme0n1 rw"]
    write(table, "\n".join([*mounts, "31 22 0:9 / /data\\040b rw - nfs4 a:/x rw"]))
    assert disk.mount_of(Path("/data/nodes"), table) == ("xfs", "/dev/nvme0n1", "/data")
    assert disk.mount_of(Path("/data b/x"), table) == ("nfs4", "a:/x", "/data b")
    assert disk.mount_of(Path("/database"), table) == ("ext4", "/dev/sda1", "/")
    assert disk.mount_of(Path("/x"), tmp_path / "none") == ("unknown", "unknown", "")


def test_a_disk_in_ram_is_minded(tmp_path: Path) -> None:
    if disk.mount_of(Path("/dev/shm"))[0] != "tmpfs" or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs that may be written here")
    findings = disk.data_directory(Path("/dev/shm"))
    assert findings[0].word is Word.WARN and "in RAM" in findings[0].found
    assert not list(Path("/dev/shm").glob(".kvstore-doctor*"))


def test_the_codec_is_run_and_the_processor_read(tmp_path: Path) -> None:
    assert host.codec().word in (Word.OK, Word.WARN)
    assert "decodes right" in host.codec().found
    write(tmp_path / "cpuinfo", "processor\t: 0\nflags\t\t: fpu ssse3 avx avx2\n")
    assert host.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "ssse3", "avx", "avx2"}
    assert host.cpu_flags(tmp_path / "none") == frozenset()


def test_a_congestion_control_that_is_not_there_is_minded() -> None:
    assert host.congestion("nosuchthing").word is Word.WARN
    assert host.congestion("reno").word is Word.OK
