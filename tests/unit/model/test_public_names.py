import exl2flow.model


def test_public_names_are_sorted_and_exist() -> None:
    names = exl2flow.model.__all__

    assert names == sorted(names, key=lambda name: (name.islower(), not name.isupper(), name))
    assert all(hasattr(exl2flow.model, name) for name in names)
