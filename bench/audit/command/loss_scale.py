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

from bench.audit.command.gradient_weights import GradientWeights, Use
from bench.audit.command.recorded_updates import Event
from bench.findings import Finding, error, good, warning

NEAR = 0.05
"""Largest relative distance of a sum from the wrong value that it is taken for, and of one in 16 bits from 1."""
EXACT = 0.01
"""The same of a sum in fp32 from 1."""


@dataclass
class LossScale:
    """The weights of losses; ``usual`` is the number of micro-batches of most updates."""

    weights: GradientWeights
    usual: int
    world: int
    divides: bool
    """Whether a framework divides by that number."""

    def criterion(self, use: Use) -> Event:
        """The criterion with the largest factor in the loss of a micro-batch."""
        losses = self.weights.micro_batch(use).get("losses", ())
        return max((loss for loss in losses if loss.get("seed")), key=lambda loss: abs(loss["seed"]), default={})

    def weight(self, use: Use, coefficient: float) -> float | None:
        """What the mean loss of a micro-batch weighs; None if that is not visible."""
        loss = self.criterion(use)
        terms = 1.0 if loss.get("reduction") == "mean" else loss.get("terms")
        return coefficient * loss["seed"] * terms if terms and loss.get("reduction") else None

    def findings(self) -> Iterator[Finding]:
        """What the weights sum to, and whether all terms weigh the same."""
        sums: dict[int, float] = {}
        for part in (part for part in self.weights.parts if part.is_resolved):
            known = []
            for use, coefficient in part.weights.items():
                if (weight := self.weight(use, coefficient)) is None:
                    text = f"the number of terms of the loss is not visible: {self.line(use)}"
                    yield warning("scale not judged", text)
                    return
                known.append(weight)
            # Of replicas the one whose sum is farthest from 1.
            sums[part.update] = max(sum(known), sums.get(part.update, 1.0), key=lambda total: abs(total - 1))
        allowed = NEAR if self.weights.is_low else EXACT
        wrong = {number: total for number, total in sums.items() if abs(total - 1) > allowed}
        if not sums:
            yield warning("scale not judged", "micro-gradients are 0, or too alike to be told apart")
        elif wrong:
            number = next(iter(wrong))
            example = f"weights sum to {wrong[number]:.4g} in {len(wrong)} of {len(sums)} updates"
            yield self._wrong(wrong, example, len(wrong) == len(sums))
        else:
            yield good("scale 1", f"the weights of micro-batches sum to {sums[min(sums)]:.4g}: a mean")
        yield from self._of_terms()

    def _wrong(self, wrong: dict[int, float], example: str, is_everywhere: bool) -> Finding:
        """What sums other than 1, by update, are equal to."""
        if doubt := self._several_losses():
            return warning("scale not judged", f"{example}; {doubt}")
        first, usual, world = next(iter(self.weights.ranks)), self.usual, self.world
        counts = {number: len(self.weights.ranks[first].updates[number].micro_batches) for number in wrong}

        def all_are(expected: Callable[[int], float]) -> bool:
            return all(abs(total / expected(counts[number]) - 1) < NEAR for number, total in wrong.items())

        # Where a mean is averaged over ranks, 1 / W is a factor of the loss.
        divisible = self.criterion((first, 0, 0)).get("reduction") != "mean"
        also = f"; or it is scaled by the number of ranks, which is {world} too" if world == usual else ""
        if all(count < usual for count in counts.values()) and all_are(lambda count: count / usual):
            return error("partial window", f"{min(counts.values())} of {usual} micro-batches: {example}")
        if is_everywhere and usual > 1 and all_are(float):
            return error("not divided", f"the loss is not divided by N: {example}{also}")
        if is_everywhere and usual > 1 and all_are(lambda count: count / usual**2) and (usual > 2 or self.divides):
            return error("divided twice", f"the loss is divided by N twice: {example}{also}")
        by_ranks = all_are(lambda _: world) or (divisible and all_are(lambda _: 1 / world))
        if is_everywhere and world > 1 and by_ranks:
            return error("scaled by ranks", f"{example}, with {world} ranks")
        return warning("scale", f"{example}: this may be meant")

    def _several_losses(self) -> str:
        """Why backwards of an update may be parts of a loss instead of micro-batches."""
        updates = next(iter(self.weights.ranks.values())).updates
        if len({update.steps[0]["id"] for update in updates}) > 1:
            return "several optimizers step in turn"
        for update in updates:
            sampled = [event for event in update.micro_batches if event["samples"]]
            if any(event["keeps_graph"] for event in sampled):
                return "backwards share a graph"
            if not all(event["scalar"] for event in sampled):
                return "backward does not begin at a scalar"
            if len({tuple(sorted(loss["node"] for loss in event["losses"])) for event in sampled}) > 1:
                return "the micro-batches of an update have different losses"
            for event in sampled:
                factors = [abs(loss.get("seed") or 0.0) for loss in event["losses"]]
                if sum(factors) > (1 + NEAR) * max(factors):
                    return "the loss has several terms"
        return ""

    def _of_terms(self) -> Iterator[Finding]:
        """Whether the terms of an update weigh the same, where micro-batches have different numbers of them."""
        spread, sizes = 0.0, set()
        for part in self.weights.parts:
            terms = {use: terms for use in part.weights if (terms := self.criterion(use).get("terms"))}
            each = [(self.weight(use, part.weights[use]) or 0.0) / count for use, count in terms.items()]
            sizes |= {*terms.values()}
            spread = max(spread, 1 - min(each) / max(each)) if each and max(each) > 0 else spread
        if len(sizes) > 1 and spread < self.weights.tolerance:
            yield good("token-exact", "all terms of the loss of an update have the same weight")
        elif len(sizes) > 1:
            yield warning("mean of means", f"terms of the loss of one update differ in weight by up to {spread:.0%}")

    def line(self, use: Use) -> str:
        """The criterion of a micro-batch and the factor that it receives."""
        loss = self.criterion(use)
        if not loss:
            return "no criterion found"
        return f"{loss['node']} ({loss['reduction'] or 'unknown reduction'}) receives {loss['seed']:.4g}"
