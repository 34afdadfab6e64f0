"""The building blocks of a model, each aware of its rank's share: linears, embedding, norm, rotary, attention layer."""
