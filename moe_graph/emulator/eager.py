"""x"""
def install() -> None:
    pass
