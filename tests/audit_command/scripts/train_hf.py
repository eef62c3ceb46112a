"""transformers' Trainer with a small Llama: train_hf.py VARIANT."""

import sys
import tempfile

import torch
from small_lm import ACCUMULATE, BATCH, VOCABULARY, WIDTH, Tokens, save_losses
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

variant = sys.argv[1]
losses = []


class Rows(torch.utils.data.Dataset):
    """Rows whose first labels, more or fewer of them, do not count."""

    def __init__(self, rows):
        self.tokens = Tokens(rows)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        x, y = self.tokens[index]
        row = torch.cat([x, y[-1:]])
        labels = row.clone()
        labels[: index * 3 % 6] = -100
        return {"input_ids": row, "labels": labels}


class Stock(Trainer):
    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        losses.append(loss.detach())
        return loss / ACCUMULATE if variant == "twice" else loss


class IgnoresItems(Trainer):
    """The loss of a user who knows nothing of num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


torch.manual_seed(0)
heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, **heads)
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUMULATE,
    num_train_epochs=2,
    learning_rate=1e-3,
    use_cpu=True,
    ddp_backend="gloo",
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)
trainer = (IgnoresItems if variant == "ignores-items" else Stock)(
    model=LlamaForCausalLM(config), args=settings, train_dataset=Rows(32)
)
trainer.train()
save_losses(losses)
