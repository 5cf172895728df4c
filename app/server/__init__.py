"""`gpt.py serve`: an OpenAI-compatible server over the engines of generation/.

Its packages are the extra [serve]. A request passes security, app, endpoints, requests (and chat) and plan
to the scheduler, and comes back through calls and responses.
"""
