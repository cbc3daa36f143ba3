"""What runs in a row's children: one module a row, or a pair of rows.

Each function takes the port, the seeded fault (None: the correct code) and JSON arguments, and returns JSON. torch is
imported inside the functions that need it: the parent imports these modules, and a child proves its hook live first.
"""
