"""Requests, queues, steps: decides what runs, and says what it meant. Plain Python over kv/; no torch, no ray."""
