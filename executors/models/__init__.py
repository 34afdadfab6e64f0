"""Model families on one decoder implementation: `registry.build_model`, `base.CausalLM`."""
