"""Structured output: grammars from schemas, expressions and EBNF, compiled in a helper process, matched per request."""
