"""By what TRL divides the DAPO loss of one update, where steps_per_generation is twice gradient_accumulation_steps."""

import json

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = {word: number for number, word in enumerate(["<pad>", "<eos>", "a", "b", "c", "d"])}
raw = Tokenizer(models.WordLevel(words, unk_token="a"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **size, **heads))
seen = []


class Watched(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        lengths = inputs["completion_mask"].sum(1)
        # Before the first update each token's loss is minus its advantage.
        seen.append((int(lengths.sum()), float(-(inputs["advantages"] * lengths).sum() / loss)))
        return loss


arguments = GRPOConfig(
    output_dir=".",
    loss_type="dapo",
    per_device_train_batch_size=2,
    num_generations=8,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    max_completion_length=4,
    generation_kwargs={"min_new_tokens": 4},
    max_steps=1,
    beta=0.0,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)
Watched(
    model=model,
    args=arguments,
    reward_funcs=lambda completions, **_: [float(number**2) for number in range(len(completions))],
    train_dataset=Dataset.from_dict({"prompt": ["a b c d"] * 8}),
    processing_class=tokenizer,
).train()
tokens, divisor = sum(number for number, _ in seen), seen[0][1]
case = "tokens of an update / what their loss is divided by"
print(json.dumps({"case": case, "measured": round(tokens / divisor, 3), "right": 1.0}))
