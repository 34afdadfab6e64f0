"""executors.attention"""
