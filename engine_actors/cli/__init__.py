"""engine_actors.cli"""
