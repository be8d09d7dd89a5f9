"""The maths: pure functions of tensors and floats, which know torch and nothing else of Winnow.

Each kind names its variants as in a recipe (`ESTIMATORS`, `POLICY_LOSSES`, `KL_ESTIMATORS`,
`AGGREGATIONS`). A variant's options are required keyword arguments of the names that its section
of the recipe has; their defaults and ranges stand there alone.
"""
