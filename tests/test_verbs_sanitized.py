"""RDMA under the sanitizers, in a guest that has it: both ends alone (tests/native/verbs_cycles.cpp), then daemon and client whole.

The second builds all of the native core once for each sanitizer, which takes minutes: `make sanitize` runs this and its like.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_tools import ROOT, build_native
from verbs.guest import folder_in_guest, run_in_guest

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]
SANITIZERS = ["address,undefined", "thread"]
LIBRARIES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = (
    "ASAN_OPTIONS=detect_leaks=0:handle_segv=0",  # Python leaks on purpose
    "UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS=exitcode=66",
)


@pytest.mark.parametrize("fence", ["windows", "registrations"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_both_ends_connected_and_destroyed_have_nothing_to_report(sanitizer: str, fence: str) -> None:
    with folder_in_guest() as programs:
        program = build_native("verbs_cycles", ("verbs", "verbs_zone"), programs, sanitizer)
        ran = run_in_guest(str(program), "200", "rxe1", "rxe0", fence, seconds=900, env=OPTIONS)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr[-4000:]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_daemon_and_client_have_nothing_to_report(sanitizer: str) -> None:
    core = _build_core(sanitizer)
    place = next((ROOT / "kvstore" / "kernels").glob("_native.*.so"))
    loaded = ":".join(subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in LIBRARIES[sanitizer])
    script = f"mount --bind {core} {place} && LD_PRELOAD={loaded} exec {sys.executable} -m pytest -c tests/verbs/pytest.ini --timeout 0"
    env = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "KVSTORE_TRANSPORT=rdma", "KVSTORE_RDMA_DEVICE=rxe1", *OPTIONS)
    files = "tests/verbs/test_daemon.py tests/verbs/test_cluster.py tests/verbs/test_loopback.py"
    ran = run_in_guest("sh", "-c", f"{script} {files}", seconds=5400, env=env)
    assert ran.returncode == 0, f"{ran.stdout[-8000:]}\n{ran.stderr[-8000:]}"
    assert "Sanitizer" not in ran.stderr and "runtime error" not in ran.stderr, ran.stderr[-8000:]


def _build_core(sanitizer: str) -> Path:
    folder = ROOT / "build" / f"sanitize-{sanitizer.partition(',')[0]}"
    words = ["-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", f"-DKVSTORE_SANITIZE={sanitizer}"]
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *words, *launcher], check=True, capture_output=True, timeout=300)
    subprocess.run(["cmake", "--build", str(folder)], check=True, capture_output=True, timeout=3600)
    return next(folder.glob("_native.*.so"))
