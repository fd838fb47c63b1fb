"""Policies behind an OpenAI endpoint, agents that talk to them, samplers in other processes. Needs the extra `serve`."""

try:
    import httpx2  # noqa: F401
    import pydantic  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"grpolab.serve needs the package {error.name}: pip install 'grpolab[serve]'") from error
