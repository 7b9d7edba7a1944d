"""Two products and a goal for each, shared by the tests of WebShop."""

from __future__ import annotations

from envs.webshop.catalogue import Product
from envs.webshop.goals import Goal

SHIRT = Product(
    "B0SHIRT", "Acme Shirt (3)", "fashion", "shirt", "Clothing › Men › Shirts", "Made of cotton.", ("Two pockets",),
    ("long sleeve",),
    {"color": ("red", "navy blue"), "style": ("features",), "size": ("small", "x-large", "6 | 8")},
    "$12.0 to $14.0", 13.0, ("acme", "shirt"),
)  # fmt: skip
SHOES = Product(
    "B0SHOES", "Acme Shoes", "fashion", "shoes", "Shoes › Men › Boots", "", ("Soft soles", "Laces"), ("soft",), {},
    "$50.0", 50.0, ("acme", "shoes"),
)  # fmt: skip


def goal_of(product: Product) -> Goal:
    options = {name: product.options[name][1] for name in ("color", "size") if name in product.options}
    return Goal(
        product.asin, product.category, product.query, product.name, product.product_category,
        f"buy a {product.query}", product.attributes[:1], 60.0, options, nouns=product.nouns,
    )  # fmt: skip
