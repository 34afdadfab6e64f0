"""Load on any OpenAI-compatible server, and what it says of it. Used by `engine-actors bench` and benchmarks/."""
