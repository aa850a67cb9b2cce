"""What one key adds to a training: averages, compressed gradients, 4 bits, hooks; and a first look.

The engine finds each by its name in hpctrain/extensions.yaml, and imports it only if it is used.
"""
