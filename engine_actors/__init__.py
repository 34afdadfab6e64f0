"""engine_actors"""
