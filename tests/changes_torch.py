"""A module of a sound backend that changes torch when it is imported, for whoever imports it: every loss is halved."""

from __future__ import annotations

import torch

from tests.accused import Averaging

backward = torch.Tensor.backward


def halved(loss, *arguments, **options):
    return backward(loss * 0.5, *arguments, **options)


torch.Tensor.backward = halved


class ChangesTorch(Averaging):
    name = "a-changes-torch"
