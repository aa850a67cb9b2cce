"""What one key adds to a training: averages, compressed gradients, 4 bits, hooks; and a first look.

The engine finds each by its name in hpctrain/base/offered.pyi, and imports it only if it is used.
"""
