from hypothesis import settings

# Others may use the machine: how long an example takes says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
