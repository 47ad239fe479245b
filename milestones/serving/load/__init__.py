"""`python -m milestones load`: requests at random times, for any server of OpenAI's API.

command.py    the command: one run for each rate, and the table; engines in processes of their own
arrivals.py   when requests arrive, and what they ask for
client.py     send one request, and note when its tokens come
report.py     percentiles and goodput
"""
