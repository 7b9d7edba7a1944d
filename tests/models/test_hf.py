from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from seed_jax.models import hf, tensor_files, transformer
from seed_jax.models.spec import ModelSpec, init_params, map_weights
from seed_jax.sharding import make_mesh


@pytest.fixture(scope="module")
def tiny():
    spec = ModelSpec(vocab_size=31, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24)
    return spec, jax.jit(init_params, static_argnums=0)(spec, jax.random.key(2))


@pytest.fixture
def exported(tiny, tmp_path):
    spec, params = tiny
    return hf.save(params, spec, tmp_path / "model")


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def rewrite(directory, change):
    """Apply `change` to the name -> array dict of model.safetensors."""
    tensors = safetensors.numpy.load_file(directory / hf.WEIGHTS_FILE)
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / hf.WEIGHTS_FILE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bitwise(spec, params, tmp_path, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    hf.save(params, spec, tmp_path / "one", dtype=dtype)
    again_spec, again = hf.load(tmp_path / "one", dtype=dtype)
    assert again_spec == spec
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == dtype, again))
    assert_same(again, params)
    hf.save(again, again_spec, tmp_path / "two", dtype=dtype)
    assert (tmp_path / "one" / hf.WEIGHTS_FILE).read_bytes() == (tmp_path / "two" / hf.WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("max_shard_size", ["10GB", "8KB"])
def test_checkpoint_that_transformers_wrote(spec, params, tmp_path, make_rows, max_shard_size):
    """Load into transformers, let it write (one file, or shards with an index), load that, compare the logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf.save(params, spec, tmp_path / "ours", eos_token_id=[3, 4], bos_token_id=1, pad_token_id=2)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="float32", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.generation_config.eos_token_id, model.config.bos_token_id) == ([3, 4], 1)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    assert (tmp_path / "theirs" / hf.INDEX_FILE).is_file() == (max_shard_size == "8KB")
    again_spec, again = hf.load(tmp_path / "theirs")
    assert again_spec == spec
    assert_same(again, params)
    tokens, segments, positions = make_rows(spec, [[15]], 15)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    got = transformer.unembed(again, spec, transformer.hidden_states(again, spec, tokens, segments, positions))
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_any_part_of_a_weight_can_be_read(spec, params, tmp_path, monkeypatch, seed):
    """Random bounds in every dimension, the inner ones of a flattened pair included; tables in several reads."""
    monkeypatch.setattr(hf, "_ROWS_PER_READ", 60)
    rng = np.random.default_rng(seed)
    stored = tensor_files.scan(hf.save(params, spec, tmp_path / "model"))

    def check(weight, leaf):
        bounds = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in leaf.shape]
        part = hf._read_part(weight, bounds, stored, np.dtype(np.float32))
        np.testing.assert_array_equal(part, np.asarray(leaf)[tuple(slice(*one) for one in bounds)])

    map_weights(check, spec, params)


def test_each_part_is_read_once(spec, params, tmp_path, monkeypatch):
    """Eight devices hold every value at least once; what several of them hold is read for all of them together."""
    elements, read = [], tensor_files.read

    def counting(*arguments):
        tensor = read(*arguments)
        elements.append(tensor.size)
        return tensor

    monkeypatch.setattr(tensor_files, "read", counting)
    hf.save(params, spec, tmp_path / "model")
    _, loaded = hf.load(tmp_path / "model", make_mesh(fsdp=4, tensor=2))
    assert sum(elements) == spec.num_params
    assert_same(loaded, params)


def test_load_onto_a_mesh(tiny, exported):
    _, params = tiny
    _, loaded = hf.load(exported, mesh=make_mesh(fsdp=4, tensor=2))
    assert_same(loaded, params)
    assert len(loaded["layers"]["gate"].sharding.device_set) == 8
    assert loaded["layers"]["gate"].addressable_shards[0].data.shape == (2, 4, 12)


@pytest.mark.parametrize("max_shard_bytes", [1, 4000, 10**9])
def test_sharded_export_is_read_by_transformers(spec, params, tmp_path, max_shard_bytes):
    transformers = pytest.importorskip("transformers")
    out = hf.save(params, spec, tmp_path / "model", max_shard_bytes=max_shard_bytes)
    assert (out / hf.INDEX_FILE).is_file() == (max_shard_bytes < 10**9)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="float32", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(hf.load(out)[1], params)
    hf.save(params, spec, out)  # one file takes the place of the shards
    assert [path.name for path in out.glob("*safetensors*")] == [hf.WEIGHTS_FILE]


def test_every_bit_survives_export_and_import(tiny, tmp_path):
    """Subnormal numbers, signed zero, infinity and the payload of a NaN."""
    spec, params = tiny
    bits = np.random.default_rng(0).integers(0, 2**32, (31, 16), dtype=np.uint32)
    bits[0, :5] = [1, 0x007FFFFF, 0x80000000, 0x7F800000, 0x7FC12345]
    odd = {**params, "embed": jnp.asarray(bits.view(np.float32))}
    _, again = hf.load(hf.save(odd, spec, tmp_path / "model"))
    np.testing.assert_array_equal(np.asarray(again["embed"]).view(np.uint32), bits)
    small = {**params, "embed": jnp.asarray((bits >> 16).astype(np.uint16).view(jnp.bfloat16))}
    _, again = hf.load(hf.save(small, spec, tmp_path / "small", dtype="bfloat16"), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(again["embed"]).view(np.uint16), bits >> 16)


def test_redundant_tensors_are_allowed(tiny, exported):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    rewrite(exported, add)
    assert_same(hf.load(exported)[1], tiny[1])


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K_PROJ), f"lacks 1 tensor.*{K_PROJ}"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[K_PROJ]}), r"does not know.*2\.mlp\.up_proj"),
        (lambda t: t.update({K_PROJ: t[K_PROJ][:-1]}), rf"model\.safetensors.*{K_PROJ} has shape \(7, 16\).*\(8, 16\)"),
        (lambda t: t.update({K_PROJ: t[K_PROJ].astype(np.int8)}), rf"{K_PROJ} is stored as I8"),
    ],
    ids=["missing", "extra", "misshaped", "integer"],
)
def test_bad_tensors_name_tensor_and_file(exported, change, message):
    rewrite(exported, change)
    with pytest.raises(hf.CheckpointError, match=message) as error:
        hf.load(exported)
    assert str(exported) in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(exported, keep):
    path = exported / hf.WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(hf.CheckpointError, match=r"model\.safetensors is truncated"):
        hf.load(exported)


def test_dtype_must_be_floating(exported):
    with pytest.raises(ValueError, match="dtype='int8' is not a floating-point type"):
        hf.load(exported, dtype="int8")


def test_missing_files(exported, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        hf.load(tmp_path / "nowhere")
    (exported / hf.WEIGHTS_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        hf.load(exported)
    (exported / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        hf.load(exported)
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json is a file; give its directory"):
        hf.load(exported / "generation_config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{not json", "not valid JSON"), ("[1]", "JSON object"), ('{"model_type": "mamba"}', r"config\.json.*mamba")],
)
def test_bad_config(exported, text, message):
    (exported / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        hf.load(exported)


@pytest.fixture
def sharded(exported):
    """The export cut into two shards with an index."""
    tensors = safetensors.numpy.load_file(exported / hf.WEIGHTS_FILE)
    (exported / hf.WEIGHTS_FILE).unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, exported / file)
        weight_map |= dict.fromkeys(part, file)
    (exported / hf.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return exported, weight_map


def test_sharded_round_trip(tiny, sharded):
    assert_same(hf.load(sharded[0])[1], tiny[1])


def test_truncated_shard(sharded):
    path = sharded[0] / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(hf.CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated"):
        hf.load(sharded[0])


def test_bad_tensor_in_a_shard_names_that_shard(sharded):
    directory, weight_map = sharded
    tensors = safetensors.numpy.load_file(directory / weight_map[K_PROJ])
    tensors[K_PROJ] = tensors[K_PROJ][:-1]
    safetensors.numpy.save_file(tensors, directory / weight_map[K_PROJ])
    with pytest.raises(hf.CheckpointError, match=rf"{weight_map[K_PROJ]}: tensor {K_PROJ} has shape"):
        hf.load(directory)


def test_bad_index(sharded):
    directory, weight_map = sharded
    index = directory / hf.INDEX_FILE

    def fails(value, message):
        index.write_text(json.dumps(value))
        with pytest.raises(hf.CheckpointError, match=message):
            hf.load(directory)

    fails({}, "no weight_map")
    fails({"weight_map": {**weight_map, "a": 3}}, "no weight_map")
    fails({"weight_map": {**weight_map, "a": "gone.safetensors"}}, r"gone\.safetensors")
    fails({"weight_map": {**weight_map, "a": "../gone.safetensors"}}, r"gone\.safetensors")
    fails({"weight_map": {**weight_map, "ghost": "model-00001-of-00002.safetensors"}}, "lacks tensor ghost")


def test_save_copies_tokenizer_and_extra_files(tiny, tmp_path):
    spec, params = tiny
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "unrelated.bin").write_text("no")
    out = hf.save(params, spec, tmp_path / "out", source, eos_token_id=5, extra_files={"README.md": "# card\n"})
    assert {path.name for path in out.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "seed_jax.json", "tokenizer.json",
    }  # fmt: skip
    assert json.loads((out / "seed_jax.json").read_text())["files"] == sorted(path.name for path in out.iterdir())
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 5
    assert (out / "README.md").read_text() == "# card\n"


def test_save_replaces_only_at_the_end(tiny, exported, monkeypatch):
    spec, params = tiny
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    changed = jax.tree.map(lambda leaf: leaf + 1, params)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hf, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hf.save(changed, spec, exported)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == ["model"]

    hf.save(changed, spec, exported)
    assert_same(hf.load(exported)[1], changed)
    assert [path.name for path in exported.parent.iterdir()] == ["model"]


def test_save_refuses_what_is_not_an_export(tiny, exported, tmp_path):
    """A config.json alone marks nothing: the workdir of a run and every model directory have one."""
    spec, params = tiny
    (exported / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"other files beside it \(notes\.txt\)"):
        hf.save(params, spec, exported)
    (exported / "notes.txt").unlink()
    assert hf.save(params, spec, exported) == exported
    (exported / hf.RECORD_FILE).unlink()
    with pytest.raises(FileExistsError, match=r"model holds other files and no seed_jax\.json"):
        hf.save(params, spec, exported)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir()
    hf.save(params, spec, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target" / hf.WEIGHTS_FILE).is_file()


def test_an_export_of_the_first_version_may_be_replaced(tiny, exported):
    (exported / hf.RECORD_FILE).write_text('{"method": "seed"}')
    hf.save(tiny[1], tiny[0], exported)
    (exported / hf.RECORD_FILE).write_text('{"method": "seed"}')
    (exported / "checkpoints").mkdir()
    with pytest.raises(FileExistsError, match="checkpoints"):
        hf.save(tiny[1], tiny[0], exported)


def test_save_refuses(tiny, tmp_path):
    spec, params = tiny
    (tmp_path / "file").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileExistsError, match="file is a file"):
        hf.save(params, spec, tmp_path / "file")
    with pytest.raises(FileExistsError, match=r"home holds other files"):
        hf.save(params, spec, tmp_path / "home")
    with pytest.raises(ValueError, match=r"dtype='int4'.*float32, bfloat16"):
        hf.save(params, spec, tmp_path / "out", dtype="int4")
    with pytest.raises(FileNotFoundError, match="tokenizer_dir"):
        hf.save(params, spec, tmp_path / "out", tmp_path / "empty")
    for name in ("../escape", "config.json", "seed_jax.json"):
        with pytest.raises(ValueError, match="extra_files"):
            hf.save(params, spec, tmp_path / "out", extra_files={name: ""})
    wrong = {**params, "final_norm": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\)"):
        hf.save(wrong, spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert hf.save(params, spec, tmp_path / "empty").is_dir()
