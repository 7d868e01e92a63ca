package(default_visibility = ["//visibility:public"])

# target_compatible_with = ["@local_cuda//:toolkit_found"] skips a target where there is no nvcc.
constraint_setting(
    name = "toolkit",
    default_constraint_value = ":toolkit_%{STATE}",
)

constraint_value(
    name = "toolkit_found",
    constraint_setting = ":toolkit",
)

constraint_value(
    name = "toolkit_missing",
    constraint_setting = ":toolkit",
)
