"""executors.kernels"""
