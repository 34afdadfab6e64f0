"""executors.layers"""
