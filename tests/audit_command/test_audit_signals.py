"""Signals reach the command of ``audit`` as without it, and a folder that is full is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.errors import WRONG
from tests.conftest import ROOT

pytestmark = pytest.mark.torch
SAVES = """
import signal, sys, time, torch

def save(number, frame):
    time.sleep(2)
    open("saved", "a").write(f"{number} ")
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
while True:
    for i in range(4):
        scores = net(torch.randn(8, 4))
        (torch.nn.functional.cross_entropy(scores, torch.randint(2, (8,))) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    open("trained", "w").close()
    time.sleep(0.05)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("has_shell", [False, True])
def test_a_trainer_saves_on_a_signal_once_and_the_audit_waits(
    name: str, has_shell: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SAVES)
    command = [sys.executable, "train.py"]
    if has_shell:
        command = ["sh", "-c", f"{sys.executable} train.py; true"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    audit = subprocess.Popen(
        [sys.executable, "-m", "bench", "audit", "--", *command],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "trained").exists():
        assert audit.poll() is None
        time.sleep(0.1)
    os.killpg(audit.pid, getattr(signal, name))
    output, _ = audit.communicate(timeout=60)
    assert (tmp_path / "saved").read_text() == f"{getattr(signal, name).value} "
    assert output.startswith("verdict ")


def test_no_folder_for_records(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "none")}
    script = (
        "import sys, tempfile; tempfile.tempdir = '/proc/none'; from bench import cli; "
        "sys.exit(cli.main(['audit', 'true']))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert found.returncode == WRONG
    assert "TMPDIR" in found.stderr and "Traceback" not in found.stderr
