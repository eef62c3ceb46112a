"""``python tests/cuda_stub/build.py DIR``: a CUDA build of torch on GPUs that are not there, ready in that folder.

It installs the wheels of requirements.txt, compiles the stub and links it under the names of CUDA's libraries. What is
there already is not made again: wheels as long as requirements.txt is as it was, the stub as long as its sources are.
Exit status 0, or SKIPPED with one line that says what this machine lacks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]  # as a program it is in no package
import generate  # noqa: E402

SKIPPED = 77
"""Exit status where the machine cannot build it, as in automake."""
DISK_BYTES = 5 * 10**9
"""That have to be free to install: the wheel, what pip unpacks and what it keeps in its cache."""
RUNTIME = (
    "machine",
    "counters",
    "device",
    "memory",
    "stream",
    "kernel",
    "library",
    "cudnn",
    "nccl",
)
"""Sources of the library that stands in for CUDA's runtime and all that is built on it."""
VALUES = "values.so"
FLAGS = (
    "-shared",
    "-fPIC",
    "-O1",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
)


class UnavailableError(Exception):
    """Why this machine cannot build the stub, in one line."""


def build(folder: Path) -> None:
    """Build what is not there yet. Raises UnavailableError."""
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None
    )
    if compiler is None or shutil.which("nm") is None:
        raise UnavailableError("there is no C compiler with nm: install gcc and binutils")
    compiler_of_cpp = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None
    )
    if compiler_of_cpp is None:
        raise UnavailableError("there is no C++ compiler: install g++")
    folder.mkdir(parents=True, exist_ok=True)
    install(folder)
    compile_stub(folder, compiler)
    compile_values(folder, compiler_of_cpp)


def install(folder: Path) -> None:
    """The pinned wheels."""
    requirements = HERE / "requirements.txt"
    if is_as_it_was(folder / "installed", requirements.read_bytes()):
        return
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        raise UnavailableError(
            f"{free / 1e9:.1f} GB are free at {folder}, {DISK_BYTES / 1e9:g} GB are needed"
        )
    target = folder / "torch-cuda"
    shutil.rmtree(target, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--disable-pip-version-check", "--root-user-action", "ignore"]
    print(
        f"installing torch for CUDA into {target}: 0.5 GB to download, 1.2 GB on the disk",
        flush=True,
    )
    found = subprocess.run(
        [*command, "--target", str(target), "-r", str(requirements)], capture_output=True, text=True
    )
    if found.returncode:
        errors = [line for line in found.stderr.splitlines() if line.startswith("ERROR")] or [
            "pip failed"
        ]
        raise UnavailableError(f"there is no CUDA wheel: {errors[-1]}")
    # torch would find the real runtime there, before the stub. Of these wheels only the headers are wanted.
    shutil.rmtree(folder / "headers", ignore_errors=True)
    (target / "nvidia").rename(folder / "headers")
    (folder / "installed").write_text(digest(requirements.read_bytes()))


def compile_stub(folder: Path, compiler: str) -> None:
    """The stub, and links to it under the names of the libraries that torch asks for."""
    paths = [*sorted(HERE.glob("*.[ch]")), HERE / "generate.py", HERE / "build.py"]
    sources = b"".join(path.read_bytes() for path in paths)
    torch, made = folder / "torch-cuda" / "torch", folder / "lib.new"
    if is_as_it_was(folder / "compiled", sources):
        return
    shutil.rmtree(made, ignore_errors=True)
    (folder / "include" / "nv").mkdir(parents=True, exist_ok=True)
    (folder / "include" / "nv" / "target").write_text(
        "#pragma once\n"
    )  # of a wheel of 100 MB, and not used in C
    made.mkdir()
    generated = folder / "generated.c"
    include = ["-I", str(HERE)]
    headers = ["-I", str(folder / "headers/cu13/include"), "-I", str(folder / "include")]

    def link(
        name: str,
        sources: tuple[str, ...],
        also: tuple[Path, ...] = (),
        flags: tuple[str, ...] = (),
    ) -> Path:
        files = [*(str(HERE / f"{source}.c") for source in sources), *map(str, also)]
        command = [
            compiler,
            *FLAGS,
            *include,
            *flags,
            *files,
            "-o",
            str(made / name),
            "-ldl",
            "-lrt",
            "-lpthread",
        ]
        subprocess.run(command, check=True)
        return made / name

    cuda = "libcuda_stub.so"
    written = link(cuda, RUNTIME, flags=tuple(headers))
    generated.write_text(generate.succeeding(generate.missing(torch, generate.LIBRARIES, written)))
    link(cuda, RUNTIME, (generated,), tuple(headers))
    driver = "libcuda.so.1"
    written = link(driver, ("driver", "machine"))
    names = generate.missing(torch, generate.DRIVER, written, generate.ALSO_OF_THE_DRIVER)
    generated.write_text(generate.succeeding(names))
    link(driver, ("driver", "machine", "counters"), (generated,))
    link("libnvidia-ml.so.1", ("nvml", "machine"))
    for name in wanted_libraries(torch) - {driver}:
        (made / name).symlink_to(cuda)
    shutil.rmtree(folder / "lib", ignore_errors=True)
    made.rename(folder / "lib")
    (folder / "compiled").write_text(digest(sources))


def compile_values(folder: Path, compiler: str) -> None:
    """The library that gives operators their values; it takes half a minute."""
    paths = [HERE / "values.cpp", HERE / "values.h"]
    sources = b"".join(path.read_bytes() for path in paths)
    if is_as_it_was(folder / "compiled-values", sources):
        return
    torch, made = folder / "torch-cuda" / "torch", folder / "values.new"
    include = (
        torch / "include",
        torch / "include/torch/csrc/api/include",
        folder / "headers/cu13/include",
    )
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-std=c++17",
        "-w",
        str(paths[0]),
        "-o",
        str(made),
    ]
    command += [f"-I{path}" for path in (*include, folder / "include")]
    command += [
        f"-L{torch / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-ltorch_cuda",
        "-lc10",
        "-lc10_cuda",
    ]
    subprocess.run([*command, f"-L{folder / 'lib'}", "-l:libcudart.so.13"], check=True)
    made.rename(folder / VALUES)
    (folder / "compiled-values").write_text(digest(sources))


def wanted_libraries(torch: Path) -> set[str]:
    """The names of CUDA's libraries that those of an installed torch are linked with."""
    files = sorted(map(str, (torch / "lib").glob("*.so*")))
    text = subprocess.run(
        ["readelf", "--dynamic", *files], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nccl|nvshmem|nvrtc)[\w-]*\.so[.\d]*)\]", text))


def environment(folder: Path, *, values: bool = False, **settings: str) -> dict[str, str]:
    """Environment variables of a process that sees the GPUs; ``settings`` are those of the C files, as FAKE_GPUS is.

    With values, operators compute what they would on a GPU, and nothing of the bench is replaced.
    """
    root = HERE.parents[1]
    paths = [HERE / "site", root, folder / "torch-cuda"]
    return {
        **({"CUDA_VALUES": str(folder / VALUES)} if values else {}),
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_STUB": str(folder),
        "FAKE_GPUS": "1",
        **settings,
    }


def is_as_it_was(stamp: Path, content: bytes) -> bool:
    """Whether something was made of the same content before."""
    return stamp.exists() and stamp.read_text() == digest(content)


def digest(content: bytes) -> str:
    """SHA-256, of the Python version too, since wheels are for one."""
    return hashlib.sha256(repr(sys.version_info[:2]).encode() + content).hexdigest()


def main(arguments: list[str]) -> int:
    """Build it in the folder that is named."""
    if len(arguments) != 1:
        print("usage: build.py DIR", file=sys.stderr)
        return 2
    try:
        build(Path(arguments[0]).resolve())
    except UnavailableError as reason:
        print(f"the CUDA stub cannot be built: {reason}", file=sys.stderr)
        return SKIPPED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
