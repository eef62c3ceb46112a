"""The stub itself does what the other tests believe of it."""

from __future__ import annotations

from tests.cuda.conftest import Machine

RANKS = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(number, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(size))
    {join}
    {body}
    sys.stdout.flush()
    os._exit(0)

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, args=(3, port), nprocs=3)
"""


JOIN = """
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", device_id=torch.device("cuda", number))
"""


def run_ranks(
    machine: Machine, body: str, *, join: str = JOIN, values: bool = False, **settings: str
) -> str:
    script = machine.folder / "ranks.py"
    script.write_text(RANKS.replace("{join}", join.strip()).replace("{body}", body.strip()))
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    return machine.python(code, gpus=3, values=values, **settings)


def test_ranks_that_ask_nccl_for_different_things_are_told(machine: Machine) -> None:
    body = """
    try:
        dist.all_reduce(torch.zeros(2 + (number == 1)).cuda())
        torch.cuda.synchronize()
        print("silent")
    except dist.DistBackendError as error:
        if number == 0: print("ranks disagree" in str(error))
    """
    assert run_ranks(machine, body) == "True"


SHARED = """
    if os.environ.get("HOSTS") == "own":
        os.environ["NCCL_HOSTID"] = f"host {number}"
    torch.cuda.set_device(0)
"""


def test_nccl_refuses_ranks_with_the_same_host_and_gpu(machine: Machine) -> None:
    body = """
    try:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        values = torch.ones(1).cuda()
        dist.all_reduce(values)
        if number == 0: print(values.item())
    except dist.DistBackendError as error:
        if number == 0: print("Duplicate GPU detected" in str(error))
    """
    assert run_ranks(machine, body, join=SHARED, values=True) == "True"
    assert run_ranks(machine, body, join=SHARED, values=True, HOSTS="own") == "3.0"


def test_what_a_process_sees_of_its_gpus(machine: Machine) -> None:
    code = """
import os, torch
uuids = [str(torch.cuda.get_device_properties(i).uuid)[:8] for i in range(torch.cuda.device_count())]
free = torch.cuda.mem_get_info()[0]
taken = torch.empty(2**30, dtype=torch.uint8, device="cuda")
more = free - torch.cuda.mem_get_info()[0]
pid = os.fork()
if pid == 0:
    import ctypes
    count = ctypes.c_int()
    os._exit(ctypes.CDLL("libcudart.so.13").cudaGetDeviceCount(ctypes.byref(count)))
print(uuids, more == 2**30, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), torch.ones(2).pin_memory().is_pinned())
"""
    visible = "GPU-13131313-1313-1313-1313-131313131313,GPU-11111111"
    forked = 3  # cudaErrorInitializationError
    assert (
        machine.python(code, gpus=4, CUDA_VISIBLE_DEVICES=visible)
        == f"['13131313', '11111111'] True {forked} True"
    )
