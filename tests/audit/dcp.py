"""FSDP2 whose optimizer goes through torch's distributed checkpoint when a training is resumed."""

from __future__ import annotations

from bench.backends.fsdp2 import FSDP2Eager


class WithDCP(FSDP2Eager):
    name, framework = "x-dcp", "Extra"

    def continue_training(self, job):
        from torch.distributed.checkpoint.state_dict import (
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        if job.resume:  # the state to load into is asked for first, as torch's tutorial does
            template = get_optimizer_state_dict(self.model, self.optimizer)
            set_optimizer_state_dict(self.model, self.optimizer, template)
        super().continue_training(job)
