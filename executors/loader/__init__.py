"""executors.loader"""
