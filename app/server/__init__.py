"""`gpt.py serve`: an OpenAI-compatible server over the engines of generation/. Its packages are the extra [serve].

A request goes through security, app, requests (or chat), plan, scheduler, and back through responses.
"""
