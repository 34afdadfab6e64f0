"""The KV cache as bookkeeping: specs, planning, blocks, prefix cache. Knows neither requests nor devices."""
