"""The maths: pure functions of tensors and floats, which know torch and nothing of Winnow.

Each module names its variants in a dict (`ESTIMATORS`, `POLICY_LOSSES`, `KL_ESTIMATORS`,
`AGGREGATIONS`), keyed as in a recipe; a variant's options are keyword arguments of the same
names as in its section of the recipe. A new variant is a function and a line in the dict.
"""
