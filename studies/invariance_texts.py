"""What docs/invariance.md says in words, and what was checked by hand."""

from __future__ import annotations

INTRODUCTION = """\
```sh
python -m bench invariance --vary "--gas {N} --micro-batch {B}" --batch 8 --accumulate 1,4 -- \\
    torchrun --nproc-per-node 2 train.py --seed 0
```

This runs a training command once per split of its batch, and the first split twice (A/A). After each of the first
updates it compares on every rank: gradients before and after clipping, the optimizer's state, buffers, changes
and copies of parameters (moving averages), learning rates, schedules and loss scales.
[Other options may vary, or the whole command](commands.md#the-same-training-twice).
[invariance.yml](../.github/examples/invariance.yml) is a workflow to copy, for pull requests.

| verdict | exit status | what it says |
| --- | --- | --- |
| bitwise equal | 0 | all bits are the same |
| equal to rounding | 0 | differences are below a bound, which the screen states |
| differs | 1 | the first update that differs, its tensors, and the factor if there is one |
| not judged | 3 | what differs may depend on the split: dropout, BatchNorm, contrasted rows, quantized tensors |
| not comparable | 3 | other samples, other initial values, or a command that differs from itself |

If a command fails, its exit status is returned. Of each tensor the norm, 64 elements, a hash of its bits and 64 signed
sums are kept, which give a difference's norm within some 10 %."""
SIZES_OF_ROUNDING = """\
The bound of a gradient is sqrt(n) u for sums of n = 2^21 terms in fp32, or sqrt(100) u for a hundred layers in the
dtype of the graph, where u is the unit roundoff (Higham and Mary 2019): 9e-5 in fp32, 0.04 in bf16. No right script
below uses more than {apart} of it. States that add up gradients get three times as much. Adam can turn rounding into a
whole step, so changes of parameters may differ by 10 %, and only elements are compared whose gradient is ten times
above its rounding. In later updates the bound grows by four times what the parameters differ by."""
LIMITS = """\
## What it cannot see

- What all splits do alike, such as a wrong scale of gradients, which [audit](audit.md) judges, except a parameter in
  DistributedDataParallel that ranks change differently.
- Updates after the sampled ones, or after the first with other samples.
- In bf16, faults below some 4 % of a gradient; in any dtype, faults in gradients far below 1 % of the largest; with
  optimizers of inverse roots or orthogonal factors (Shampoo, Muon), faults below 30 %, and integer states.
- Averages and schedules that are neither modules, nor schedules of torch or DeepSpeed, nor lists or dictionaries with a
  tensor per parameter in an attribute or global variable.
- Quantized training is recognized by names of functions in the graph (FP8, FP4, 8 bits); without one it may be called
  different.
- Optimizers not derived from `torch.optim.Optimizer`, or with several backwards per step; `python -I` or `-E`.
- Optimizers that amplify rounding without bound, such as exact factors of a rank-deficient gradient, may be called
  different; so may a loss that depends on its micro-batch as a whole. Without a loader or an input that shows the
  samples, only a factor is called different."""
PUBLIC = """\
## Scripts of other projects

Tiny models, random tokens, on the CPU. *Italics*: what the code of each script has shown.
"""
PUBLIC_SCRIPTS: tuple[tuple[str, str, str, str], ...] = (
    (
        "karpathy/nanoGPT, `train.py`",
        "3adf61e",
        "without an evaluation equal to rounding; with one not comparable: other samples in update 1",
        "true: the evaluation draws B rows from the training's generator",
    ),
    (
        "karpathy/build-nanogpt, `train_gpt2.py`, two ranks, bf16",
        "01fd941",
        "**differs**: gradients by up to 0.93 of their norm; not reduced: ranks drift apart",
        "true: `require_backward_grad_sync` is set after the forward; 6104ab1 is equal to rounding",
    ),
    (
        "lucidrains/x-transformers, `train_enwik8.py`",
        "9252ed7",
        "update 1 equal to rounding; then other samples",
        "true: the validation loader draws B rows from the same generator after update 1",
    ),
    (
        "huggingface/accelerate, `by_feature/gradient_accumulation.py`",
        "16cb6eb",
        "not judged: dropout; equal to rounding with dropout 0",
        "true",
    ),
    (
        "trl's `SFTTrainer`, rows of 4 to 19 words",
        "1.16.0",
        "equal to rounding",
        "true: token-exact",
    ),
    (
        "sentence-transformers' trainer, `CosineSimilarityLoss`",
        "6.2.0",
        "equal to rounding",
        "true; gradients of key biases are rounding alone",
    ),
    (
        "the same, `MultipleNegativesRankingLoss`",
        "6.2.0",
        "not judged: rows are contrasted",
        "true: 2 rows have 1 negative, 8 have 7",
    ),
    (
        "DeepSpeed's engine, ZeRO-2 with an offloaded optimizer",
        "0.18.9",
        "**differs**: gradients by up to 0.71",
        "true: known bad; 0.19.8 is equal to rounding",
    ),
    (
        "peft's LoRA in transformers' Trainer; the Trainer with Adafactor; torchao's `AdamW8bit`",
        "0.21.2; 5.23.0; 0.18.0",
        "equal to rounding",
        "true",
    ),
    (
        "Poutyne's `Model.fit_generator`, 20 rows per epoch",
        "1.19.0",
        "equal to rounding",
        "true: divided by the rows of the window",
    ),
    (
        "pytorch-accelerated's `Trainer`, MONAI's `SupervisedTrainer` and torchtnt's `AutoUnit`, 20 rows per epoch",
        "0.1.61, 1.6.1, 0.2.4",
        "**differs**: gradients by the factor 0.5 in update 3",
        "true: an epoch's rest is divided by N",
    ),
    (
        "pytorch-ignite's `create_supervised_trainer` and MMEngine's `Runner`, 20 rows per epoch",
        "0.5.5, 0.10.7",
        "updates 1 and 2 equal to rounding; then other inputs",
        "true: an epoch's rest belongs to the next one's first update",
    ),
    (
        "torchao's FP8 linear layers, emulated, in a plain loop",
        "0.18.0",
        "not judged: quantized tensors",
        "true: scales are of the micro-batch",
    ),
    (
        "torchao's weights in 8 bits in a plain loop, 20 rows per epoch",
        "0.18.0",
        "updates 1 and 2 equal to rounding; then other inputs",
        "true",
    ),
)
