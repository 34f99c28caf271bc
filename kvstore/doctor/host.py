"""Processor, kernel, clock and limits of this host, as far as the store depends on them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore import tcp
from kvstore.doctor.finding import Finding, Word
from kvstore.sysfs import text_of
from kvstore.units import format_seconds

# Vector units that ISA-L has code for, widest first: (flags of /proc/cpuinfo, what its page calls the path).
ISAL_PATHS: Final = ((("avx512f", "avx512bw", "avx512vl"), "AVX-512"), (("avx2",), "AVX2"), (("avx",), "AVX"), (("ssse3",), "SSSE3"))
CODE_BYTES: Final = 1 << 20  # of one data shard, coded to see that parity is right and how fast
IO_URING_SETUP: Final = 425  # the same number on every architecture that Linux gained since 5.1
IO_URING_PARAMS_BYTES: Final = 120
FILES_MIN: Final = 1024  # a client has a few connections to each node
FILES_WANTED: Final = 4096  # what a node takes by default
UNSYNCHRONISED: Final = 0x0040  # STA_UNSYNC of sys/timex.h
TIMEX_BYTES: Final = 208
ERROR_WARN_SECONDS: Final = 0.25  # what `kvstore status` warns of between hosts


def codec() -> Finding:
    """Which way ISA-L can go on this processor; ten data shards are coded and two lost ones decoded, and the bytes compared."""
    flags = cpu_flags()
    path = next((name for needs, name in ISAL_PATHS if all(need in flags for need in needs)), "")
    if platform.machine() in ("aarch64", "arm64"):
        path = "SVE" if "sve" in flags else "NEON"
    measured: dict[str, Any] = {"machine": platform.machine(), "widest": path or None, "gfni": "gfni" in flags}
    try:
        from kvstore.kernels._native import Codec
    except ImportError as error:
        return Finding("erasure", Word.BAD, f"no native core ({error})", "install kvstore's wheel, or build it: make setup", measured)
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (10, CODE_BYTES), dtype=np.uint8)
    parity, back = np.empty((2, CODE_BYTES), np.uint8), np.empty((2, CODE_BYTES), np.uint8)
    coder = Codec(10, 2)
    coder.encode(data, parity)
    began = time.monotonic()
    coder.encode(data, parity)
    seconds = time.monotonic() - began
    coder.decode(list(range(2, 12)), [*data[2:], *parity], [0, 1], list(back))
    measured["encode_bytes_per_second"] = int(data.nbytes / seconds) if seconds > 0 else None
    if not np.array_equal(back, data[:2]):
        return Finding("erasure", Word.BAD, "two lost shards did not decode right", "report it with the processor's model", measured)
    speed = f"10+2 encodes {data.nbytes / seconds / 1e9:.1f} GB/s, decodes right" if seconds > 0 else "10+2 decodes right"
    if not path:
        return Finding("erasure", Word.WARN, f"no vector unit that ISA-L has code for; {speed}", "a processor with SSSE3 or NEON", measured)
    return Finding("erasure", Word.OK, f"processor up to {path}: ISA-L takes the widest it has code for; {speed}", "", measured)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    for line in text_of(cpuinfo).splitlines():
        name, colon, words = line.partition(":")
        if colon and name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def io_uring() -> Finding:
    """Sets a ring up, as a node's direct read engine does."""
    libc = ctypes.CDLL(None, use_errno=True)
    params = ctypes.create_string_buffer(IO_URING_PARAMS_BYTES)
    ring = libc.syscall(ctypes.c_long(IO_URING_SETUP), ctypes.c_uint(4), params)
    if ring >= 0:
        os.close(ring)
        return Finding("io_uring", Word.OK, f"a ring was set up (kernel {platform.release()})", "", {"works": True})
    code = ctypes.get_errno()
    disabled = text_of(Path("/proc/sys/kernel/io_uring_disabled"))
    fix = "a kernel from 5.6 on; in a container, a seccomp profile that allows it"
    if disabled in ("1", "2"):
        fix = "sysctl kernel.io_uring_disabled=0"
    if code == errno.ENOMEM:
        fix = "raise the memlock limit: old kernels count rings against it"
    why = os.strerror(code).lower()
    return Finding("io_uring", Word.WARN, f"no ring ({why}): nodes read buffered, not direct", fix, {"works": False, "errno": code})


def clock() -> list[Finding]:
    """Leases and expiry run on the monotonic clock; touches and tickets on the wall clock, which hosts must share."""
    before, boot = time.monotonic_ns(), text_of(Path("/proc/sys/kernel/random/boot_id"))
    source = text_of(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    steps = [time.monotonic_ns() for _ in range(1000)]
    forward = all(a <= b for a, b in zip([before, *steps], steps, strict=False))
    measured = {"boot_id": boot or None, "clocksource": source or None, "monotonic": forward}
    findings = []
    if not forward:
        findings.append(Finding("clock", Word.BAD, "the monotonic clock went backwards", "tell who runs the hypervisor", measured))
    elif not boot:
        findings.append(Finding("clock", Word.WARN, "no boot id: a node takes each restart for one of the host", "mount /proc", measured))
    else:
        findings.append(Finding("clock", Word.OK, f"monotonic ({source or 'source not told'}), boot id {boot[:8]}", "", measured))
    return [*findings, _synchronised()]


def _synchronised() -> Finding:
    """What the kernel was told by chrony or ntpd."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # modes = 0: only asks
    state = libc.adjtimex(timex)
    if state < 0:
        why = os.strerror(ctypes.get_errno()).lower()
        return Finding("time sync", Word.SKIP, f"the kernel does not say ({why})")
    fields = np.frombuffer(timex.raw, np.int64)
    # struct timex: modes | offset | freq | maxerror | esterror | status | ..., each at a multiple of 8 on 64-bit Linux
    status, worst = int(np.frombuffer(timex.raw, np.int32)[10]), int(fields[3]) / 1e6
    measured = {"synchronised": not status & UNSYNCHRONISED, "error_max_seconds": worst}
    if status & UNSYNCHRONISED:
        fix = "run chronyd, or none is needed where the hypervisor keeps the clock: kvstore status compares the nodes'"
        return Finding("time sync", Word.WARN, "nobody tells the kernel that its clock is synchronised", fix, measured)
    word = Word.WARN if worst > ERROR_WARN_SECONDS else Word.OK
    fix = "chronyc tracking" if word is Word.WARN else ""
    return Finding("time sync", word, f"synchronised, at most {format_seconds(worst)} off by its own word", fix, measured)


def congestion(wanted: str = "cubic") -> Finding:
    """`wanted`: what data connections ask for by default."""
    host = text_of(Path("/proc/sys/net/ipv4/tcp_congestion_control"))
    there = text_of(Path("/proc/sys/net/ipv4/tcp_available_congestion_control")).split()
    why = tcp.refusal(wanted)
    measured = {"wanted": wanted, "host": host or None, "available": there, "works": not why}
    if not why:
        return Finding("tcp", Word.OK, f"{wanted} for data connections (the host's own is {host or 'not told'})", "", measured)
    found = f"{wanted} is refused ({why}): connections use the host's, {host or 'not told'}"
    fix = f"modprobe tcp_{wanted}; sysctl net.ipv4.tcp_allowed_congestion_control"
    return Finding("tcp", Word.WARN, found, fix, measured)


def files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    measured = {"limit": soft, "hard_limit": hard, "in_use": in_use}
    found = f"{soft} may be open (hard limit {hard})"
    fix = f"ulimit -n {max(FILES_WANTED, 65536)}, or LimitNOFILE=65536 in the unit"
    if soft < FILES_MIN:
        return Finding("files", Word.BAD, f"{found}: a client of many nodes needs more", fix, measured)
    if soft < FILES_WANTED:
        return Finding("files", Word.WARN, f"{found}: a node takes {FILES_WANTED} connections by default", fix, measured)
    return Finding("files", Word.OK, found, "", measured)
