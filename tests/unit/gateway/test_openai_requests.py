"""What of a request to the OpenAI routes reaches the workers: prompts, sampling, defaults, the template."""

from distserve.messages import SubmitRequest
from distserve_gateway.chat_template import ChatTemplate
from tests.unit.gateway import vocabularies
from tests.unit.gateway.posting import CHAT, COMPLETIONS, USER, post
from tests.unit.gateway.scripted import MAX_MODEL_LEN, TOKENIZER, memory_cluster, says, serving


async def test_the_prompt_has_four_forms_and_n_multiplies() -> None:
    def script(request: SubmitRequest) -> list[int]:
        return [*TOKENIZER.encode(f"{request.key.output_index}", add_special_tokens=False), 2]

    async with serving(script) as cluster:
        ids = TOKENIZER.encode("hello", add_special_tokens=False)
        for prompt, num in (("a", 1), (["a", "b"], 2), (ids, 1), ([ids, ids, ids], 3)):
            body = (await post(cluster, COMPLETIONS, {"prompt": prompt, "n": 2})).json()
            assert [c["text"] for c in body["choices"]] == [str(i) for i in range(2 * num)]
            assert [c["index"] for c in body["choices"]] == list(range(2 * num))
        sent = {tuple(r.token_ids) for r in cluster.workers["p0"].submitted}
        assert tuple(ids) in sent
        keys = [(r.key.request_id, r.key.output_index) for r in cluster.workers["p0"].submitted]
        assert len(set(keys)) == len(keys) == 14


async def test_a_prompt_in_a_list_draws_what_it_draws_alone() -> None:
    async with serving(says("x")) as cluster:
        await post(cluster, COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, "seed": 5})
        sent = sorted(cluster.workers["p0"].submitted, key=lambda r: r.key.output_index)
        assert [r.key.output_index for r in sent] == list(range(6))
        assert [r.sampling.stream for r in sent] == [0, 1] * 3
        await post(cluster, COMPLETIONS, {"prompt": "b", "n": 2, "seed": 5})
        alone = sorted(cluster.workers["p0"].submitted[6:], key=lambda r: r.key.output_index)
        assert [r.sampling for r in alone] == [r.sampling for r in sent[2:4]]


async def test_all_outputs_of_a_request_share_the_seed_and_an_absent_one_is_drawn() -> None:
    async with serving(says("x")) as cluster:
        await post(cluster, COMPLETIONS, {"prompt": "a", "n": 2, "seed": -1})
        await post(cluster, COMPLETIONS, {"prompt": "a", "n": 2})
        await post(cluster, COMPLETIONS, {"prompt": "a", "n": 2})
        seeds = [r.sampling.seed for r in cluster.workers["p0"].submitted]
        assert seeds[:2] == [2**64 - 1] * 2
        assert seeds[2] == seeds[3]
        assert seeds[4] == seeds[5] != seeds[2]


async def test_sampling_fields_reach_the_worker() -> None:
    async with serving(says("x")) as cluster:
        body = {
            "prompt": "a",
            "max_tokens": 7,
            "min_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {"5": -100, "6": 1.5},
            "stop_token_ids": [9, 8],
            "ignore_eos": True,
            "user": "someone",
        }
        assert (await post(cluster, COMPLETIONS, body)).status_code == 200
        sampling = cluster.workers["p0"].submitted[0].sampling
        assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 3, 0.5)
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0.9, 40, 0.05, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.25)
        assert sampling.logit_bias == {5: -100.0, 6: 1.5}
        assert sampling.stop_token_ids == (9, 8)
        assert sampling.ignore_eos
        assert sampling.logprobs is None


async def test_defaults_for_max_tokens() -> None:
    async with serving(says("x")) as cluster:
        await post(cluster, COMPLETIONS, {"prompt": "a"})
        await post(cluster, CHAT, {"messages": USER})
        completion, chat = cluster.workers["p0"].submitted
        assert completion.sampling.max_tokens == 16
        assert chat.sampling.max_tokens == MAX_MODEL_LEN - len(chat.token_ids)


async def test_text_parts_developer_role_and_template_variables() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ tone }}")
    async with serving(says("x"), template=template) as cluster:
        body = {
            "messages": [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None},
            ],
            "chat_template_kwargs": {"tone": "dry"},
        }
        assert (await post(cluster, CHAT, body)).status_code == 200
        prompt = TOKENIZER.decode(cluster.workers["p0"].submitted[0].token_ids, skip_special_tokens=False)
        assert prompt == "[system:d][user:a\nb][assistant:]dry"


async def test_no_generation_prompt_on_wish() -> None:
    async with serving(says("x")) as cluster:
        await post(cluster, CHAT, {"messages": USER, "add_generation_prompt": False})
        prompt = TOKENIZER.decode(cluster.workers["p0"].submitted[0].token_ids, skip_special_tokens=False)
        assert prompt.endswith("<|im_end|>\n")


async def test_a_chat_needs_a_template() -> None:
    async with serving(says("x")) as cluster:
        cluster.gateway.pipeline.intake._template = None
        response = await post(cluster, CHAT, {"messages": USER})
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]
        assert vocabularies.CHATML  # the others have one


async def test_a_colocated_decode_worker_gets_the_request_itself() -> None:
    cluster = memory_cluster()
    try:
        worker = await cluster.add("decode", "d0", says("alone"), colocated=True)
        await cluster.start_gateway()
        await cluster.see("d0")
        assert (await post(cluster, COMPLETIONS, {"prompt": "a"})).json()["choices"][0]["text"] == "alone"
        assert worker.submitted[0].decode_worker is None
    finally:
        await cluster.close()
