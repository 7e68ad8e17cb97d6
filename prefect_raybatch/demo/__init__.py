"""The bundled demo: a small industry classifier and the customers file that goes with it.

Importing this module reads nothing and needs only the standard library. The customers file
comes from :mod:`prefect_raybatch.demo.customers`; the model is rebuilt by ``training/train.py``.
"""

from pathlib import Path

#: Folder of the bundled model (Hugging Face layout: config, safetensors weights, tokenizer).
DEMO_MODEL: Path = Path(__file__).resolve().parent / "model"

#: Precision of the bundled model on a CPU. Its weights are stored in bfloat16, which a CPU without
#: AVX-512 computes six times slower (26 instead of 155 rows/s on an AMD EPYC of 2021).
CPU_DTYPE: str = "float32"

#: The nine industries, in the order the prompt names them.
LABELS: tuple[str, ...] = (
    "Law Firm",
    "Healthcare",
    "Technology",
    "Retail",
    "Consulting",
    "Manufacturing",
    "Finance",
    "Real Estate",
    "Other",
)

#: System prompt the model was trained on.
SYSTEM: str = (
    "You are a helpful assistant that infers company industries. "
    "Based on the company name provided, output only the industry category. "
    f"Choose from: {', '.join(LABELS)}."
)

#: User prompt the model was trained on; ``{Company}`` is the column it is filled from.
TEMPLATE: str = "What industry is this company in: {Company}"


def demo_model_path() -> str:
    """Return the path of the bundled model's folder.

    Raises ``FileNotFoundError`` if the package was installed without its data files.
    """
    if not (DEMO_MODEL / "config.json").is_file():
        raise FileNotFoundError(
            f"no model in {DEMO_MODEL}: reinstall the package, or train it with training/train.py"
        )
    return str(DEMO_MODEL)


__all__ = ["CPU_DTYPE", "DEMO_MODEL", "LABELS", "SYSTEM", "TEMPLATE", "demo_model_path"]
