from hypothesis import settings

# Other programs may use the machine, so an example has no time limit.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
