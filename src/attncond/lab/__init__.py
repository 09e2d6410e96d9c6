"""The lab: the papers' experiments as recipes, run at any scale, and tables made from the runs.

Needs ``pip install 'attncond[lab]'``. Nothing of the core imports it.
"""
