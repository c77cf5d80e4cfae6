from tests.launch.kit import place

__all__ = ["place"]
