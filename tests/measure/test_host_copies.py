"""What is copied between host and device, by hand; the device is torch's meta device, which any machine has."""

from __future__ import annotations

import torch

from bench.measure.host_copies import HostCopies
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST


def test_copies_are_counted_by_direction_while_a_window_is_open() -> None:
    on_host, on_device = torch.ones(4), torch.empty(4, device="meta")
    copies = HostCopies()
    with copies:
        on_host.to("meta")  # before the window
        copies.start()
        on_host.to("meta")
        on_device.copy_(on_host)
        torch._foreach_copy_([on_device, on_device], [on_host, on_host])
        on_host.to("meta", torch.bfloat16)  # cast on the way
        on_host.clone()
        on_device.clone()
        torch.ones(()).to("meta")  # a number, as a norm
        copies.stop()
        on_host.to("meta")
    assert copies.bytes == {COPIED_TO_DEVICE: 4 * 16 + 8, COPIED_TO_HOST: 0}
