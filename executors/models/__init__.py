"""executors.models"""
