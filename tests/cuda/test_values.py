"""Values over the stub: operators and collectives compute what they would on a GPU, also where streams are threads."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.cells import counted_cell
from tests.cuda.conftest import Machine
from tests.cuda.test_stub import run_ranks


@pytest.fixture(scope="module", params=["", "1"], ids=["at once", "by threads"])
def errors(request: pytest.FixtureRequest, shared_machine: Machine) -> dict[str, float]:
    """How far each case of operators.py is from the CPU's values."""
    streams = {"FAKE_STREAMS": request.param} if request.param else {}
    code = "import runpy; runpy.run_module('tests.cuda.operators', run_name='__main__')"
    found: dict[str, float] = json.loads(shared_machine.python(code, values=True, **streams))
    return found


def test_operators_have_the_values_of_the_cpu(errors: dict[str, float]) -> None:
    limits = {name: 0.01 if "attention in bf16" in name else 1e-6 for name in errors}
    assert len(errors) > 10 and not {
        name: error for name, error in errors.items() if not error <= limits[name]
    }


HAS_KEYS = " ospke" in Path("/proc/cpuinfo").read_text()
"""Whether the processor has keys that keep a thread from memory."""


@pytest.mark.skipif(not HAS_KEYS, reason="needs a processor with protection keys")
def test_the_host_cannot_read_the_memory_of_a_device(machine: Machine) -> None:
    code = """
import ctypes
import torch
on_device = torch.ones(4, device="cuda")
print(on_device.sum().item(), flush=True)
ctypes.c_float.from_address(on_device.data_ptr()).value
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=machine.environment(1, values=True),
        capture_output=True,
        text=True,
    )
    assert process.stdout == "4.0\n" and process.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("streams", [{}, {"FAKE_STREAMS": "1"}], ids=["at once", "by threads"])
def test_threads_that_the_host_made_first_leave_the_memory_of_devices_alone(
    machine: Machine, streams: dict[str, str]
) -> None:
    """As an optimizer on the host makes them, before operators on the device that are as large.

    Without protection keys they could touch it.
    """
    code = """
import torch
torch.set_num_threads(2)
on_host = torch.ones(2**20) * 2
on_device = torch.ones(2**20, device="cuda") * 2
product = torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
print(on_device.sum().item() == on_host.sum().item(), product.max().item(), torch.get_num_threads())
"""
    assert machine.python(code, values=True, **streams) == "True 512.0 2"


def test_an_operator_without_values_raises_and_names_itself(machine: Machine) -> None:
    code = """
import torch
try:
    torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda"))
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    assert (
        machine.python(code, values=True)
        == "aten::cudnn_convolution has no values over the stub of CUDA"
    )


def test_a_kernel_of_no_operator_raises(machine: Machine) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import torch; torch.cuda._sleep(1)"],
        env=machine.environment(1, values=True),
        capture_output=True,
        text=True,
    )
    assert process.returncode and "outside an operator of torch has no values" in process.stderr


COLLECTIVES = """
    size_of_all, failed = 300_001, []
    def check(name, found, expected):
        if not torch.equal(found.cpu(), expected): failed.append(name)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        parts = [(torch.arange(size_of_all) % 7 + one).to(dtype) for one in range(size)]
        own = parts[number].cuda()
        for op, expected in {"SUM": parts[0] + parts[1] + parts[2], "MAX": parts[2], "MIN": parts[0]}.items():
            summed = own.clone()
            dist.all_reduce(summed, op=getattr(dist.ReduceOp, op))
            check(f"{op} {dtype}", summed, expected)
        gathered = torch.zeros(size * size_of_all, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, own)
        check(f"gather {dtype}", gathered, torch.cat(parts))
        in_place = torch.cat(parts).cuda() * (number + 1)
        dist.reduce_scatter_tensor(in_place[number * size_of_all : (number + 1) * size_of_all], in_place)
        check(f"scatter {dtype}", in_place[number * size_of_all : (number + 1) * size_of_all], parts[number] * 6)
        dist.broadcast(own, 1)
        check(f"broadcast {dtype}", own, parts[1])
        dist.reduce(own, 2)
        check(f"reduce {dtype}", own, parts[1] * 3 if number == 2 else parts[1])
        turned = torch.zeros(3 * size_of_all, dtype=dtype, device="cuda")
        dist.all_to_all_single(turned, torch.cat(parts).cuda())
        check(f"all to all {dtype}", turned, parts[number].repeat(3))
    parts = [torch.arange(size_of_all) + one for one in range(size)]
    own, received = parts[number].cuda(), torch.zeros(size_of_all, dtype=torch.int64, device="cuda")
    ring = [dist.P2POp(dist.isend, own, (number + 1) % size), dist.P2POp(dist.irecv, received, (number - 1) % size)]
    for work in dist.batch_isend_irecv(ring): work.wait()
    check("ring", received, parts[number - 1])
    dist.scatter(received, [one.cuda() for one in parts] if number == 1 else None, 1)
    check("scatter from 1", received, parts[number])
    one = torch.full((1,), [256.0, 1.0, 1.0][number], dtype=torch.bfloat16).cuda()
    dist.all_reduce(one)
    check("rounded at each addition", one, torch.full((1,), 256.0, dtype=torch.bfloat16))
    mean = torch.full((1,), float(number)).cuda()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    check("mean", mean, torch.ones(1))
    objects = [{"rank": number}]
    dist.broadcast_object_list(objects, 1)
    if objects != [{"rank": 1}]: failed.append("objects")
    few = dist.new_group([0, 2])
    if number != 1:
        dist.all_reduce(ones := torch.ones(5, device="cuda"), group=few)
        check("group", ones, torch.full((5,), 2.0))
    everything = [None] * size
    dist.all_gather_object(everything, failed)
    if number == 0: print(sum(everything, []))
"""


@pytest.mark.parametrize("streams", [{}, {"FAKE_STREAMS": "1"}], ids=["at once", "by threads"])
def test_nccl_moves_and_reduces_messages_of_any_size(
    machine: Machine, streams: dict[str, str]
) -> None:
    assert run_ranks(machine, COLLECTIVES, values=True, **streams) == "[]"


def test_counts_and_memory_are_the_same_with_and_without_values(machine: Machine) -> None:
    backends = ("fsdp2-deferred", "deepspeed-zero3-eager")
    cells = [
        dataclasses.replace(counted_cell(name, 1), model="micro", sequence_length=32)
        for name in backends
    ]
    counts, peaks = [], []
    for values in (False, True):
        trials = machine.trials(cells, ("time", "memory"), gpus=1, counted=True, values=values)
        counts.append(
            [[window["counts"] for window in trial["found"]["windows"]] for trial in trials]
        )
        peaks.append([trial["found"]["memory"] for trial in trials])
    assert counts[0] == counts[1] and peaks[0] == peaks[1]
    assert all(window["KERNEL"] > 100 for windows in counts[0] for window in windows)
    assert all(peak["peak_allocator_allocated"] > 2**20 for peak in peaks[0])
