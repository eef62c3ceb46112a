"""What docs/invariance.md says in words, and what was checked by hand."""

from __future__ import annotations

INTRODUCTION = """\
```sh
python -m bench invariance --vary "--gas {N} --micro-batch {B}" --batch 8 --accumulate 1,4 -- \\
    torchrun --nproc-per-node 2 train.py --seed 0
```

runs a training command once per split of its batch, and once more for the first split (A/A), and says whether the same
samples in N micro-batches give the same update. After each of the first updates (`--updates`, 3) it compares what every
rank holds: gradients before and after clipping, the optimizer's state, buffers, changes of parameters, copies of
parameters (moving averages, targets), learning rates, schedules, counts of steps and loss scales. So it needs no
knowledge of a framework.

Not only N may vary: `--vary "--compile {0,1}"` has values of its own, and `-- COMMAND --other -- COMMAND` compares two
commands, such as those of two commits. In a command, `{run}` is the number of the run (for an output folder of its
own), `{port}` a free port, and `{vary}` the place of the options, which else are at the end.

| verdict | exit status | what it says |
| --- | --- | --- |
| bitwise equal | 0 | all tensors that were compared have the same bits |
| equal to rounding | 0 | they differ by no more than rounding explains; the bound is in the answer |
| differs | 1 | something depends on the split: the first update, kind of state, tensors and, if it is one, the factor |
| not judged | 3 | what differs may do so: dropout, BatchNorm, rows of a micro-batch that are contrasted |
| not comparable | 3 | other samples, another start, or a command that differs from itself, with what to fix |

If a command fails, its exit status is returned. As a check of a pull request:
[invariance.yml](../.github/examples/invariance.yml).

Each tensor is kept as a sketch: its norm, 64 signed sums, 64 elements and a hash of its bits. Signed sums are linear,
so the norm of a difference follows from two sketches, within some 10 %."""
SIZES_OF_ROUNDING = """\
The bound of a gradient is sqrt(n) u for a sum of n = 2^21 terms in fp32, or sqrt(100) u for a hundred layers that
round one after the other in the dtype of the graph (Higham and Mary 2019): 9e-5 in fp32, 0.04 in bf16. Of all scripts
below that are right, none uses more than {apart} of it. States that add gradients or their squares get three times as
much. AdamW turns the rounding of a tiny gradient into a whole step, so the change of a parameter is judged by
elements whose gradient is ten times above its rounding, up to 10 %. From the second update on, the bound grows by 4
times what the parameters' changes differ by."""
LIMITS = """\
## What it cannot see

- What both runs do alike, such as a loss that is divided by N where N is 1 in both, or gradients of another scale:
  [audit](audit.md) judges these. An exception is a parameter in DistributedDataParallel that ranks change differently.
- Updates after those that were sampled, and later ones if samples differ from some update on: it says where it stops.
- In bf16, faults below some 4 % of a gradient.
- Tensors whose gradients are below 1 % of the largest, as far as rounding of that 1 % goes.
- A change of an optimizer with inverse roots or orthogonal factors (Shampoo, SOAP, Muon) below 30 %, if gradients and
  linear states agree. States as integers (8 bit) are not judged unless they are bitwise equal.
- Where a script amplifies rounding without a limit, as an exact factorization of a gradient without full rank does, a
  right one may be called different.
- Losses that depend on the rows of a micro-batch, other than cross-entropies of a row with its own place, are called
  different: so they are.
- Averages and schedules that are neither modules, nor schedules of torch or DeepSpeed, nor a list or dictionary in an
  attribute or global variable with one tensor per parameter.
- Samples where neither a loader of torch nor the inputs of the graph show them: differences are then not judged, unless
  they are one factor.
- Optimizers that are none of torch's (`torch.optim.Optimizer`), or run several backwards per step.
- `python -I` and `-E` ignore PYTHONPATH, so nothing is seen."""
PUBLIC = """\
## Scripts that nobody here wrote

Each was run on the CPU, at N = 1 and B = 8 against N = 4 and B = 2. Only sizes and data were changed (random tokens,
tiny models). What was found was checked by reading the code. None of them is a part of this repository.
"""
PUBLIC_SCRIPTS: tuple[tuple[str, str, str, str], ...] = ()
