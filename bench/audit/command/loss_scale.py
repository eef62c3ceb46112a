"""Whether the weights of the losses of an update sum to 1, and if not, to what.

The criterion of a micro-batch is a mean or sum of terms. A hook on its autograd node reads its factor f in the loss
that backward was called with, so c f, times the number of terms of a sum, is what the mean loss of that micro-batch
weighs in the gradient. With N micro-batches on each of W ranks these weights are 1 / (N W) if all is right, and sum to
1. They sum to N if the loss is not divided, to 1 / N if it is divided twice, to n / N in a window of only n
micro-batches, and to W or 1 / W if ranks are summed or averaged once too often. A loss may have any other factor on
purpose, so nothing else is called wrong, and a wrong factor must be that of every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.audit.command.gradient_weights import TOLERANCE, ExplainedGradient
from bench.audit.command.inside.records import MicroBatch, Rank
from bench.findings import Finding, error, good, warning

NEAR = 0.05
"""Largest relative distance of a sum from the wrong value that it is taken for."""


def described(micro_batch: MicroBatch) -> str:
    """The criterion of a micro-batch and the factor that it receives."""
    found = micro_batch.criterion
    if not found.get("seed"):
        return "no criterion found"
    return f"{found['node']} ({found['reduction'] or 'unknown reduction'}) receives {found['seed']:.4g}"


@dataclass
class LossScale:
    """Judges the weights of losses; most updates of a rank have the ``usual`` micro-batches."""

    gradients: list[ExplainedGradient]
    rank: Rank
    usual: int

    def findings(self) -> Iterator[Finding]:
        """What the weights sum to, and whether all terms weigh the same."""
        resolved = [gradient for gradient in self.gradients if gradient.is_resolved]
        if any(weight.loss_weight is None for gradient in resolved for weight in gradient.weights):
            text = f"the number of terms of the loss is not visible: {described(self.rank.sampled[0].micro_batches[0])}"
            yield warning("scale not judged", text)
            return
        totals = [(found.update, sum(weight.loss_weight or 0.0 for weight in found.weights)) for found in resolved]
        # Of replicas the one whose sum is farthest from 1.
        sums = dict(sorted(totals, key=lambda total: abs(total[1] - 1)))
        wrong = {number: total for number, total in sums.items() if abs(total - 1) > TOLERANCE}
        if not sums:
            yield warning("scale not judged", "micro-gradients are 0, or too alike to be told apart")
        elif wrong:
            yield self._wrong(wrong, len(sums))
        else:
            yield good("scale 1", f"the weights of micro-batches sum to {sums[min(sums)]:.4g}: a mean")
        yield from self._of_terms()

    def _wrong(self, wrong: dict[int, float], num_updates: int) -> Finding:
        """What sums other than 1, by update, are equal to."""
        example = f"weights sum to {wrong[min(wrong)]:.4g} in {len(wrong)} of {num_updates} updates"
        for doubt in self._doubts():
            return warning("scale not judged", f"{example}; {doubt}")
        usual, world = self.usual, self.rank.world
        counts = {number: self.rank.sampled[number].count for number in wrong}
        also = f"; or it is scaled by the number of ranks, which is {world} too" if world == usual else ""
        is_partial = all(count < usual for count in counts.values())
        of_n = len(wrong) == num_updates and usual > 1
        of_world = len(wrong) == num_updates and world > 1
        # Twice 2 may be any 4, and where a mean is averaged over ranks, 1 / W is a factor of the loss.
        is_twice = of_n and (usual > 2 or usual in {update.asked for update in self.rank.sampled})
        is_sum = of_world and self.rank.sampled[0].micro_batches[0].criterion.get("reduction") != "mean"
        candidates: tuple[tuple[bool, Callable[[int], float], str, str], ...] = (
            (is_partial, lambda n: n / usual, "partial window", f"{min(counts.values())} of {usual} micro-batches: "),
            (of_n, float, "not divided", "the loss is not divided by N: "),
            (is_twice, lambda n: n / usual**2, "divided twice", "the loss is divided by N twice: "),
            (of_world, lambda _: world, "scaled by ranks", f"with {world} ranks "),
            (is_sum, lambda _: 1 / world, "scaled by ranks", f"with {world} ranks "),
        )
        for is_possible, expected, topic, text in candidates:
            if is_possible and all(abs(total / expected(counts[n]) - 1) < NEAR for n, total in wrong.items()):
                return error(topic, f"{text}{example}{also if of_n else ''}")
        return warning("scale", f"{example}: this may be meant")

    def _doubts(self) -> Iterator[str]:
        """Why backwards of an update may be parts of a loss instead of micro-batches."""
        for update in self.rank.sampled:
            yield from update.doubts
        if len({update.optimizer for update in self.rank.sampled}) > 1:
            yield "several optimizers step in turn"
        for update in self.rank.sampled:
            losses = [found.criteria for found in update.micro_batches]
            if len({tuple(sorted(criterion["node"] for criterion in loss)) for loss in losses}) > 1:
                yield "the micro-batches of an update have different losses"
            factors = [[abs(criterion["seed"] or 0.0) for criterion in loss] for loss in losses if loss]
            if any(sum(loss) > (1 + NEAR) * max(loss) for loss in factors):
                yield "the loss has several terms"

    def _of_terms(self) -> Iterator[Finding]:
        """Whether the terms of an update weigh the same, where micro-batches have different numbers of them."""
        counted = [
            [(w.loss_weight, w.terms) for w in found.weights if w.loss_weight and w.terms] for found in self.gradients
        ]
        shares = [[weight / terms for weight, terms in weights] for weights in counted]
        spread = max((1 - min(each) / max(each) for each in shares if max(each, default=0.0) > 0), default=0.0)
        sizes = {terms for weights in counted for _, terms in weights}
        if len(sizes) > 1 and spread < TOLERANCE:
            yield good("token-exact", "all terms of the loss of an update have the same weight")
        elif len(sizes) > 1:
            yield warning("mean of means", f"terms of the loss of one update differ in weight by up to {spread:.0%}")
