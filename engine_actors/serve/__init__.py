"""engine_actors.serve"""
