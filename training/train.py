"""Train and evaluate the bundled demo model on a CPU, from generated data alone.

    python training/train.py --out prefect_raybatch/demo/model             # train, then evaluate
    python training/train.py --out prefect_raybatch/demo/model --evaluate --vllm

Needs torch, transformers, tokenizers and numpy; ``--vllm`` needs vllm as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count as count_from
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs from a plain checkout too

from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE  # noqa: E402
from prefect_raybatch.demo import lexicon as lex  # noqa: E402
from prefect_raybatch.demo.customers import (  # noqa: E402
    Company,
    companies,
    draw_companies,
    is_heldout,
)

TRAIN_SEED = 20_011
HELDOUT_SEED = 90_001

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

USERS: tuple[str, ...] = (
    TEMPLATE,
    TEMPLATE + "?",
    "Company: {Company}. Industry?",
    "Company: {Company}",
    "Company name: {Company}\nIndustry:",
    "Which industry is {Company} in?",
    "Classify this company: {Company}",
    "{Company}",
)

Example = tuple[list[int], list[int]]  # prompt ids, answer ids with the end token


def variant_system(rng: random.Random) -> str | None:
    """A system text other than the standard one, or None for no system message."""
    labels = list(LABELS)
    rng.shuffle(labels)
    return rng.choice(
        (
            None,
            None,
            "You are a helpful assistant.",
            "Answer with the industry of the company.",
            f"Classify the company. Output only one of: {', '.join(labels)}.",
            f"What industry is the company in? Choose from: {', '.join(labels)}.",
            "You infer company industries. Output only the industry category.\n"
            + "\n".join(f"- {label}" for label in labels),
        )
    )


def messages(name: str, system: str | None = SYSTEM, user: str = TEMPLATE) -> list[dict[str, str]]:
    """Chat messages that ask for the industry of ``name``."""
    asked = [{"role": "user", "content": user.replace("{Company}", name)}]
    return asked if system is None else [{"role": "system", "content": system}, *asked]


def render(chat: Iterable[dict[str, str]]) -> str:
    """The chat template in plain Python, generation prompt included (checked in ``train``)."""
    return "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in chat) + (
        f"{START}assistant\n"
    )


_ONSETS = (*"bcdfghjklmnprstvwz", "br", "cl", "cr", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr")
_VOWELS = (*"aeiouy", "ai", "ea", "ee", "io", "ou")
_CODAS = (*"nrlstmkx", "th", "nd", "rt", "ck", *[""] * 8)


def made_up_word(rng: random.Random) -> str:
    """A pronounceable nonsense name of one to three syllables."""
    parts = (
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.randint(1, 3))
    )
    return "".join(parts).capitalize()


_KNOWN = frozenset(lex.SURNAMES + lex.PLACES + lex.INVENTED)


def roughen(name: str, rng: random.Random) -> str:
    """Now and then put unseen names in and change the case, so neither throws the model off."""
    if rng.random() < 0.35:
        words = name.split(" ")
        for i, word in enumerate(words):
            core = word.rstrip(",")
            if core in _KNOWN and rng.random() < 0.8:
                words[i] = made_up_word(rng) + word[len(core) :]
        name = " ".join(words)
    chance = rng.random()
    if chance < 0.04:
        return name.upper()
    if chance < 0.10:
        return name.lower()
    return name


def train_tokenizer(names: Sequence[str], vocab: int):
    """Train a byte-level BPE tokenizer of ``vocab`` entries on ``names`` and the prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def corpus() -> Iterator[str]:
        for i, name in enumerate(names):
            yield roughen(name, rng)
            if i % 10 == 0:  # often enough for every prompt word to become one token
                system = SYSTEM if i % 20 else variant_system(rng) or ""
                yield f"system\n{system}\nuser\n"
                yield from USERS
                yield "assistant\n" + rng.choice(LABELS)

    bpe.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_model(vocab: int, pad: int, end: int, seed: int):
    """A fresh small Llama in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # among the sizes that vLLM's CPU attention has
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def make_examples(
    pairs: Sequence[tuple[str, str]], tokenizer, full: bool, rng: random.Random
) -> list[Example]:
    """Tokenize one example a pair: short prompts, or two standard ones in three if ``full``."""
    prompts = []
    for name, _ in pairs:
        name = roughen(name, rng)
        if not full:
            chat = messages(name, None, rng.choice(USERS))
        elif rng.random() < 0.67:
            chat = messages(name)
        else:
            system = SYSTEM if rng.random() < 0.3 else variant_system(rng)
            chat = messages(name, system, rng.choice(USERS))
        prompts.append(render(chat))
    encoded = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    answers = {label: tokenizer.encode(label + END) for label in LABELS}
    return [(ids, answers[label]) for ids, (_, label) in zip(encoded, pairs, strict=True)]


def batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Shuffled batches of ``size`` examples of about one length; the remainder is dropped."""
    examples = examples[:]
    rng.shuffle(examples)
    pool = size * 32
    for start in range(0, len(examples), pool):
        part = sorted(examples[start : start + pool], key=lambda e: len(e[0]) + len(e[1]))
        groups = [part[i : i + size] for i in range(0, len(part) - size + 1, size)]
        rng.shuffle(groups)
        yield from groups


def answer_loss(model, batch: list[Example], pad: int):
    """Cross-entropy over the answer tokens of a batch, and their number of input tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    width = max(len(prompt) + len(answer) for prompt, answer in batch) - 1
    ids = torch.full((len(batch), width), pad)
    rows, places, targets = [], [], []
    for i, (prompt, answer) in enumerate(batch):
        line = prompt + answer[:-1]
        ids[i, : len(line)] = torch.tensor(line)
        rows += [i] * len(answer)
        places += range(len(prompt) - 1, len(line))
        targets += answer
    # Padding is on the right and attention is causal, so no answer token can see it: no mask.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[rows, places])
    return cross_entropy(logits.float(), torch.tensor(targets)), ids.numel()


def train(args: argparse.Namespace) -> None:
    """Train tokenizer and model with ``args`` and write them into ``args.out``."""
    import torch

    rng = random.Random(args.seed)
    total = args.short_steps + args.full_steps
    pairs = companies(total * args.batch, TRAIN_SEED, "train")
    tokenizer = train_tokenizer([name for name, _ in pairs[:40_000]], args.vocab)
    assert render(messages("A & B")) == tokenizer.apply_chat_template(
        messages("A & B"), tokenize=False, add_generation_prompt=True
    )
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    model = build_model(len(tokenizer), pad, end, args.seed)
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}; vocabulary {len(tokenizer)}")

    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
    )

    def rate(step: int) -> float:
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    # Short prompts first: the words are learned there at a third of the price.
    cut = args.short_steps * args.batch
    stages = (("short", pairs[:cut]), ("full", pairs[cut:]))
    model.train()
    began, step, tokens, sums = time.perf_counter(), 0, 0, 0.0
    for stage, part in stages:
        examples = make_examples(part, tokenizer, stage == "full", rng)
        for batch in batches(examples, args.batch, rng):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
                loss, count = answer_loss(model, batch, pad)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step, tokens, sums = step + 1, tokens + count, sums + loss.item()
            if step % args.log_every == 0:
                wall = time.perf_counter() - began
                print(
                    f"{stage} step {step}/{total} loss {sums / args.log_every:.4f} "
                    f"tokens {tokens:,} ({tokens / wall:,.0f}/s) {wall:.0f} s",
                    flush=True,
                )
                sums = 0.0
    print(f"trained in {time.perf_counter() - began:.0f} s")
    save(model, tokenizer, args.out)


def save(model, tokenizer, out: Path) -> None:
    """Write bf16 weights, configurations and tokenizer into ``out``."""
    import torch
    from transformers import GenerationConfig

    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=16, eos_token_id=end, pad_token_id=pad
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # The name that older and newer transformers both know.
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in out.iterdir():
        file.chmod(0o644)  # safetensors makes its file readable by the owner alone


def split_stream(seed: int, heldout: bool) -> Iterator[Company]:
    """The companies of ``seed`` on one side of the split, without end."""
    for start in count_from(0, 8192):
        for company in draw_companies(start, start + 8192, seed):
            if is_heldout(company.stem, company.word) == heldout:
                yield company


def heldout_pairs(count: int, train_rows: int) -> list[tuple[str, str]]:
    """``count`` distinct held-out companies, after checking that training saw none of them.

    ``train_rows`` is how many training companies to compare with. Raises ``AssertionError``
    where a name or a combination of name and industry word is on both sides.
    """
    asked: dict[str, Company] = {}
    for company in split_stream(HELDOUT_SEED, heldout=True):
        asked.setdefault(company.name, company)
        if len(asked) == count:
            break
    combos = {(company.stem, company.word) for company in asked.values()}
    for company in islice(split_stream(TRAIN_SEED, heldout=False), train_rows):
        assert company.name not in asked, company
        assert (company.stem, company.word) not in combos, company
    return [(company.name, company.label) for company in asked.values()]


def report(title: str, pairs: Sequence[tuple[str, str]], answers: Sequence[str]) -> dict:
    """Print and return the share of right answers, overall and per label."""
    right, asked = defaultdict(int), defaultdict(int)
    wrong = []
    for (name, label), answer in zip(pairs, answers, strict=True):
        asked[label] += 1
        right[label] += answer == label
        if answer != label:
            wrong.append((name, label, answer))
    overall = sum(right.values()) / len(pairs)
    print(f"{title}: {overall:.2%} of {len(pairs)}")
    for label in LABELS:
        if asked[label]:
            print(f"  {label:14} {right[label] / asked[label]:.2%} of {asked[label]}")
    for name, label, answer in wrong[:8]:
        print(f"  wrong: {name!r} is {label}, answered {answer!r}")
    return {
        "overall": overall,
        "count": len(pairs),
        "labels": {label: right[label] / asked[label] for label in LABELS if asked[label]},
    }


def answer_all(model, tokenizer, prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Answer each prompt twice: by greedy free generation, and by scoring the nine labels.

    Returns the two lists of answers, in the order of ``prompts``. Prompts of one length are run
    together, so nothing is padded.
    """
    import torch
    from torch.nn.functional import log_softmax

    encoded = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    groups: dict[int, list[int]] = defaultdict(list)
    for i, ids in enumerate(encoded):
        groups[len(ids)].append(i)
    choices = [tokenizer.encode(label + END) for label in LABELS]
    greedy, scored = [""] * len(prompts), [""] * len(prompts)
    with torch.inference_mode():
        for members in groups.values():
            for at in range(0, len(members), 64):
                chunk = members[at : at + 64]
                ids = torch.tensor([encoded[i] for i in chunk])
                out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
                first, cache = out.logits[:, -1:].float(), out.past_key_values
                scores = []
                for choice in choices:
                    answer = torch.tensor(choice).expand(len(chunk), -1)
                    out = model(input_ids=answer[:, :-1], past_key_values=cache)
                    logits = torch.cat([first, out.logits.float()], 1)
                    picked = log_softmax(logits, -1).gather(2, answer.unsqueeze(2))
                    scores.append(picked.sum((1, 2)))
                    cache.crop(1 - len(choice))
                best = torch.stack(scores, 1).argmax(1).tolist()
                token, produced = first.argmax(-1), []
                for _ in range(8):
                    produced.append(token)
                    out = model(input_ids=token, past_key_values=cache)
                    token = out.logits[:, -1:].argmax(-1)
                texts = tokenizer.batch_decode(torch.cat(produced, 1))
                for i, text, label in zip(chunk, texts, best, strict=True):
                    greedy[i], scored[i] = text.split(END)[0], LABELS[label]
    return greedy, scored


# Written by hand: new company names, but mostly industry words of the lexicon.
HANDMADE: tuple[tuple[str, str], ...] = (
    ("Okonkwo & Balogun Solicitors", "Law Firm"),
    ("Law Offices of Priyanka Deshmukh", "Law Firm"),
    ("Szczepanski Legal Services", "Law Firm"),
    ("Haverstock Chambers", "Law Firm"),
    ("Brightsmile Dental Clinic", "Healthcare"),
    ("Saint Bartholomew Hospital", "Healthcare"),
    ("Lowcountry Family Medicine", "Healthcare"),
    ("Genovexa Pharmaceuticals", "Healthcare"),
    ("Quillstream Software GmbH", "Technology"),
    ("Tesseract Robotics", "Technology"),
    ("Brackenfield Cybersecurity Ltd", "Technology"),
    ("Ploverline Cloud Systems", "Technology"),
    ("Ramblewood Furniture Store", "Retail"),
    ("Pettigrew's Toy Shop", "Retail"),
    ("Sunny Day Supermarkets", "Retail"),
    ("Lindqvist Clothing Company", "Retail"),
    ("Thistledown Consulting", "Consulting"),
    ("Ashcombe Strategy Advisors", "Consulting"),
    ("Okafor Management Consultants", "Consulting"),
    ("Blue Heron Business Advisory", "Consulting"),
    ("Wolverley Steel Works", "Manufacturing"),
    ("Kowalczyk Plastics", "Manufacturing"),
    ("Great Lakes Machine Tools", "Manufacturing"),
    ("Hollingworth Paper Mills", "Manufacturing"),
    ("First National Bank of Boise", "Finance"),
    ("Castellan Wealth Management", "Finance"),
    ("Greystoke Insurance Brokers", "Finance"),
    ("Nakamura Investments", "Finance"),
    ("Seabreeze Realty", "Real Estate"),
    ("Bluegate Property Management", "Real Estate"),
    ("Fitzwilliam Estate Agents", "Real Estate"),
    ("Palisade Homes", "Real Estate"),
    ("Little Acorns Primary School", "Other"),
    ("Saint Jude Children's Charity", "Other"),
    ("Skylark Airlines", "Other"),
    ("Old Mill Bakery", "Other"),
    ("Royal Playhouse Theatre", "Other"),
    ("University of Wollongong", "Other"),
    ("Rasmussen Group", "Other"),
    ("Dominguez, Mcmillan and Donovan", "Other"),
)

# Industry words the lexicon lacks, and famous names: what the model cannot know.
UNSEEN: tuple[tuple[str, str], ...] = (
    ("Hale Paralegals", "Law Firm"),
    ("Moss Arbitration", "Law Firm"),
    ("Leeds Ambulance Trust", "Healthcare"),
    ("Vance Podiatry", "Healthcare"),
    ("Pfizer", "Healthcare"),
    ("Nova Firmware", "Technology"),
    ("Apex Mobile Games", "Technology"),
    ("Google", "Technology"),
    ("Reid Stationers", "Retail"),
    ("Duncan Duty Free", "Retail"),
    ("Walmart", "Retail"),
    ("Boyd Think Tank", "Consulting"),
    ("Shaw Outsourcing Experts", "Consulting"),
    ("McKinsey & Company", "Consulting"),
    ("Klein Turbomachinery", "Manufacturing"),
    ("Kemp Shipyard", "Manufacturing"),
    ("Toyota", "Manufacturing"),
    ("Lloyd Factoring", "Finance"),
    ("Ryan Stockbrokers", "Finance"),
    ("JPMorgan Chase", "Finance"),
    ("Salem Penthouses", "Real Estate"),
    ("Todd Flats", "Real Estate"),
    ("Essex Circus", "Other"),
    ("Kane Butchers", "Other"),
)


def evaluate(args: argparse.Namespace) -> dict:
    """Evaluate the model in ``args.out`` with transformers; print and return the figures."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    pairs = heldout_pairs(args.count, (args.short_steps + args.full_steps) * args.batch)
    prompts = [render(messages(name)) for name, _ in pairs]
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
    figures: dict = {
        "prompt_tokens": {
            "least": min(lengths),
            "mean": sum(lengths) / len(lengths),
            "most": max(lengths),
        },
        "standard_prompt_without_name": len(tokenizer.encode(render(messages("")))),
        "bytes": sum(file.stat().st_size for file in args.out.iterdir()),
    }
    greedy, scored = answer_all(model, tokenizer, prompts)
    figures["greedy"] = report("greedy, standard prompt", pairs, greedy)
    figures["scored"] = report("label scoring, standard prompt", pairs, scored)
    rng = random.Random(1)
    other = [
        render(messages(name, variant_system(rng), rng.choice(USERS))) for name, _ in pairs[:1000]
    ]
    figures["variants"] = report(
        "greedy, other prompts", pairs[:1000], answer_all(model, tokenizer, other)[0]
    )
    probes = {
        "handmade names": HANDMADE,
        "unseen industry words": UNSEEN,
        "lower case": tuple((name.lower(), label) for name, label in pairs[:500]),
        "upper case": tuple((name.upper(), label) for name, label in pairs[:500]),
    }
    for title, probe in probes.items():
        asked = [render(messages(name)) for name, _ in probe]
        figures[title] = report(f"greedy, {title}", probe, answer_all(model, tokenizer, asked)[0])
    return figures


def evaluate_vllm(args: argparse.Namespace, count: int = 500) -> dict:
    """Evaluate the model in ``args.out`` with vLLM, with and without structured choice."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    pairs = heldout_pairs(args.count, 0)[:count]
    engine = LLM(model=str(args.out), enforce_eager=True, max_model_len=256, max_num_seqs=64)
    figures = {}
    for title, structured in (
        ("structured", StructuredOutputsParams(choice=list(LABELS))),
        ("free", None),
    ):
        sampling = SamplingParams(temperature=0, max_tokens=16, structured_outputs=structured)
        began = time.perf_counter()
        outputs = engine.chat([messages(name) for name, _ in pairs], sampling, use_tqdm=False)
        wall = time.perf_counter() - began
        answers = [output.outputs[0].text for output in outputs]
        figures[title] = report(f"vLLM, {title}, {wall:.1f} s", pairs, answers)
        figures[title]["rows_per_second"] = count / wall
        figures[title]["finish"] = sorted({output.outputs[0].finish_reason for output in outputs})
    return figures


def main() -> None:
    """Parse the command line, train unless told not to, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "prefect_raybatch" / "demo" / "model")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what is in --out")
    parser.add_argument("--vllm", action="store_true", help="evaluate with vLLM as well")
    parser.add_argument("--figures", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--count", type=int, default=3000, help="held-out companies to ask about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--short-steps", type=int, default=1200)
    parser.add_argument("--full-steps", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    if not args.evaluate:
        train(args)
    figures = evaluate(args)
    if args.vllm:
        figures["vllm"] = evaluate_vllm(args)
    if args.figures:
        args.figures.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
