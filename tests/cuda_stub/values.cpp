// Gives the operators of torch for CUDA their values, over the stub, whose kernels compute none.
//
// Each operator of aten with a kernel for CUDA, unless it makes a view or allocates, gets another kernel in its place:
//   1. torch's own CUDA kernel runs: it checks, allocates outputs and workspaces by the caching allocator, and launches
//      kernels that do nothing. Meanwhile copies are counted, but move nothing.
//   2. The same operator runs on the CPU, on tensors that shadow the CUDA tensors: they have the same memory. Its results
//      are copied into what the CUDA kernel returned. What it writes in place it writes through the shadows. This is the
//      stream's work: it is done now, or later by the stream's thread (stream.c).
// Operators inside 1 do 1 alone. Where a CUDA kernel reads values on the host to go on, the host waits for the stream and
// runs 2 alone (READS_VALUES). An operator that has no kernel for the CPU is an error that names it.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <functional>
#include <regex>
#include <unordered_map>

#include "values.h"

namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// ---- shadows

// A tensor on the CPU with the memory of one on CUDA. It does not keep that memory: neither does a kernel on a device.
Tensor shadow_of(const Tensor& tensor) {
    if (!tensor.defined())
        return tensor;
    TORCH_CHECK(tensor.layout() == at::kStrided, "only strided tensors have values over the stub of CUDA");
    Tensor shadow;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (!tensor.is_cuda())
        shadow = tensor.clone();  // the host may write to it before the stream reads it
    else if (tensor.numel() == 0)
        shadow = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    else
        shadow = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        shadow.unsafeGetTensorImpl()->set_wrapped_number(true);
    return shadow;
}

// A value with each of its tensors changed.
IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
    if (value.isTensor())
        return change(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> made;
        for (const Tensor& tensor : value.toTensorVector())
            made.push_back(change(tensor));
        return made;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> made;
        for (const auto& tensor : value.toOptionalTensorVector())
            made.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
        return made;
    }
    return value;
}

IValue shadows_of(const IValue& value) {
    if (value.isDevice() && value.toDevice().is_cuda())
        return c10::Device(at::kCPU);
    return mapped(value, shadow_of);
}

// That of the first CUDA tensor, or the one asked for, or the current one.
c10::Device device_of(const std::vector<IValue>& arguments) {
    std::optional<c10::Device> found;
    for (const IValue& value : arguments) {
        mapped(value, [&](const Tensor& tensor) {
            if (!found && tensor.defined() && tensor.is_cuda())
                found = tensor.device();
            return tensor;
        });
        if (!found && value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index())
            found = value.toDevice();
    }
    return found ? *found : c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
}

// ---- operators that have no kernel for the CPU, or another one

// What an operator was called with, on the CPU, by the names of its schema.
struct Call {
    OperatorHandle op;
    std::vector<IValue> arguments;

    bool has(const std::string& name) const { return op.schema().argumentIndexWithName(name).has_value(); }
    IValue& operator[](const std::string& name) { return arguments.at(*op.schema().argumentIndexWithName(name)); }
    Tensor tensor(const std::string& name) {
        IValue& value = (*this)[name];
        return value.isTensor() ? value.toTensor() : Tensor();
    }
};
// The results; None leaves what the CUDA kernel returned.
using Computation = std::function<Stack(Call&)>;

Stack on_cpu(Call& call) {
    Stack stack(call.arguments.begin(), call.arguments.end());
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return stack;
}

// Products of bf16 or fp16: fp32 sums that are rounded once, as on a GPU; CPUs without such instructions are slow.
Stack widened(Call& call) {
    std::vector<std::pair<Tensor, Tensor>> written;
    for (size_t i = 0; i < call.arguments.size(); i++) {
        IValue& value = call.arguments[i];
        if (!value.isTensor() || !at::isReducedFloatingType(value.toTensor().scalar_type()))
            continue;
        Tensor narrow = value.toTensor(), wide = narrow.to(at::kFloat);
        auto* alias = call.op.schema().arguments()[i].alias_info();
        if (alias && alias->isWrite())
            written.emplace_back(narrow, wide);
        value = wide;
    }
    Stack results = on_cpu(call);
    for (auto& [narrow, wide] : written)
        narrow.copy_(wide);
    return results;
}

// Products with a dtype of their own: bf16 times bf16 in fp32.
Stack product_to(Call& call) {
    bool is_batched = call.op.schema().name().find("bmm") != std::string::npos;
    Tensor left = call.tensor(call.has("batch1") ? "batch1" : call.has("mat1") ? "mat1" : "self").to(at::kFloat);
    Tensor right = call.tensor(call.has("batch2") ? "batch2" : "mat2").to(at::kFloat);
    Tensor made = is_batched ? left.bmm(right) : left.mm(right);
    if (call.has("beta"))
        made = made * call["alpha"].toScalar() + call.tensor("self").to(at::kFloat) * call["beta"].toScalar();
    return {made.to(call["out_dtype"].toScalarType())};
}

struct Attention {
    Tensor q, k, v, p, lse;
    double scale;
    int64_t repeats;
};

// In fp32 and over whole rows, as the fused kernels do in registers; P is rounded to the inputs' dtype before P @ V.
Attention attention(Call& call) {
    Attention a;
    Tensor q = call.tensor("query"), k = call.tensor("key"), v = call.tensor("value");
    TORCH_CHECK(call["dropout_p"].toDouble() == 0, "dropout inside attention has no values over the stub of CUDA");
    a.repeats = q.size(1) / k.size(1);
    a.q = q.to(at::kFloat);
    a.k = k.to(at::kFloat).repeat_interleave(a.repeats, 1);
    a.v = v.to(at::kFloat).repeat_interleave(a.repeats, 1);
    a.scale = call["scale"].isNone() ? 1 / std::sqrt(double(q.size(-1))) : call["scale"].toDouble();
    Tensor scores = a.q.matmul(a.k.transpose(-2, -1)) * a.scale;
    if (call.has("attn_bias") && call.tensor("attn_bias").defined())
        scores = scores + call.tensor("attn_bias").to(at::kFloat);
    if (call["is_causal"].toBool()) {
        Tensor later = at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1);
        scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
    }
    a.lse = scores.logsumexp(-1);
    a.p = (scores - a.lse.unsqueeze(-1)).exp();
    return a;
}

Stack attention_forward(Call& call) {
    Attention a = attention(call);
    Stack results(call.op.schema().returns().size());
    auto dtype = call.tensor("query").scalar_type();
    results[0] = a.p.to(dtype).to(at::kFloat).matmul(a.v).to(dtype);
    results[1] = a.lse;
    return results;
}

Stack attention_backward(Call& call) {
    Attention a = attention(call);
    Tensor g = call.tensor(call.has("grad_out_") ? "grad_out_" : "grad_out").to(at::kFloat);
    auto dtype = call.tensor("query").scalar_type();
    Tensor p = a.p.to(dtype).to(at::kFloat), gp = g.matmul(a.v.transpose(-2, -1));
    Tensor out = call.tensor("out").to(at::kFloat);
    Tensor gs = (a.p * (gp - (g * out).sum(-1, true))).to(dtype).to(at::kFloat);
    auto summed = [&](const Tensor& grad) {  // over the query heads of one key head
        return grad.unflatten(1, {grad.size(1) / a.repeats, a.repeats}).sum(2).to(dtype);
    };
    Stack results(call.op.schema().returns().size());
    results[0] = (gs.matmul(a.k) * a.scale).to(dtype);
    results[1] = summed(gs.transpose(-2, -1).matmul(a.q) * a.scale);
    results[2] = summed(p.transpose(-2, -1).matmul(g));
    return results;
}

// Softmax of bf16 with fp32 results, and its backward: kernels for the CPU have one dtype.
Stack half_to_float(Call& call) {
    if (call["half_to_float"].toBool()) {
        call["self"] = call.tensor("self").to(at::kFloat);
        call["half_to_float"] = false;
    }
    return on_cpu(call);
}

Stack softmax_backward(Call& call) {
    call["input_dtype"] = int64_t(call.tensor("grad_output").scalar_type());
    return on_cpu(call);
}

Stack rms_norm_backward(Call& call) {
    Tensor g = call.tensor("grad_out").to(at::kFloat), x = call.tensor("input").to(at::kFloat);
    Tensor rstd = call.tensor("rstd").to(at::kFloat), weight = call.tensor("weight");
    auto num = int64_t(call["normalized_shape"].toDimVector().size());
    std::vector<int64_t> last, first;
    for (int64_t i = 0; i < x.dim(); i++)
        (i < x.dim() - num ? first : last).push_back(i);
    Tensor y = x * rstd, gy = weight.defined() ? g * weight.to(at::kFloat) : g;
    Tensor gx = rstd * (gy - y * (gy * y).mean(last, true));
    Tensor gw = weight.defined() ? first.empty() ? g * y : (g * y).sum(first) : Tensor();
    return {gx, gw};
}

const std::pair<std::regex, Computation> SPECIAL[] = {
    {std::regex("aten::_scaled_dot_product_(flash|efficient|cudnn)_attention"), attention_forward},
    {std::regex("aten::_scaled_dot_product_(flash|efficient|cudnn)_attention_backward"), attention_backward},
    {std::regex("aten::(_softmax|_log_softmax)"), half_to_float},
    {std::regex("aten::(_softmax|_log_softmax)_backward_data"), softmax_backward},
    {std::regex("aten::(mm|bmm|addmm|baddbmm|addmv)(_|\\.out)?|aten::(dot|vdot|addr|_addmm_activation|addbmm)"), widened},
    {std::regex("aten::(mm|bmm|addmm|baddbmm)\\.dtype"), product_to},
    {std::regex("aten::_fused_rms_norm_backward"), rms_norm_backward},
};

// ---- which operators

const std::regex HAS_NO_VALUES(
    "aten::(empty.*|_empty.*|set_.*|resize_.*|_resize.*|record_stream|_local_scalar_dense|is_pinned|_pin_memory"
    "|_fused_sdp_choice|is_set_to|_copy_from.*|_has_.*|_debug.*|_efficientzerotensor|_use_cudnn.*|view.*|_view.*"
    "|as_strided|_lazy_clone|_reshape_alias.*|unfold|alias|lift.*|_to_.*|to_.*|_assert_async.*)");
const std::regex READS_VALUES(
    "aten::(nonzero.*|masked_select.*|_unique.*|unique.*|bincount.*|repeat_interleave.*|equal|histc.*|_histogram.*"
    "|multinomial.*|is_nonzero|_?linalg_(?!vector_norm).*|cholesky.*|lu_.*|geqrf.*|ormqr.*|triangular_solve.*"
    "|_embedding_bag.*|randperm.*|_?ctc.*|.*median.*|mode.*|kthvalue.*|_fft.*|segment_reduce.*|_segment.*|poisson.*"
    "|_ldl.*|_cholesky.*)");

bool has_masks(const std::vector<IValue>& arguments) {
    for (const IValue& value : arguments)
        if (value.isOptionalTensorList())
            for (const auto& tensor : value.toOptionalTensorVector())
                if (tensor && tensor->defined() && (tensor->dtype() == at::kBool || tensor->dtype() == at::kByte))
                    return true;
    return false;
}

// The argument that a result is, if the operator writes to one and returns it.
std::optional<size_t> written(const c10::FunctionSchema& schema, size_t result) {
    auto* alias = schema.returns()[result].alias_info();
    for (size_t i = 0; alias && alias->isWrite() && i < schema.arguments().size(); i++) {
        auto* other = schema.arguments()[i].alias_info();
        if (other && other->beforeSets() == alias->beforeSets())
            return i;
    }
    return std::nullopt;
}

// Copies what the CPU computed into a shadow of what the CUDA kernel made, which for attention's sums may be longer.
void copy_into(Tensor whole, const Tensor& part) {
    if (!whole.defined() || !part.defined())
        return;
    if (whole.dim() == part.dim() + 1)
        whole = whole.squeeze(-1);
    if (whole.sizes() != part.sizes())
        whole = whole.slice(-1, 0, part.size(-1));
    whole.copy_(part);
}

void copy_into(const IValue& to, const IValue& from) {
    if (from.isTensor()) {
        copy_into(to.toTensor(), from.toTensor());
    } else if (from.isTensorList()) {
        auto whole = to.toTensorVector(), part = from.toTensorVector();
        for (size_t i = 0; i < whole.size(); i++)
            copy_into(whole[i], part[i]);
    }
}

// Other threads of torch have no leave to touch the memory of devices (memory.c), unless they were made by one that had it.
struct OneThread {
    int before = at::get_num_threads();
    OneThread() { set(1); }
    ~OneThread() { set(before); }
    void set(int number) const {
        if (before != 1)
            at::set_num_threads(number);
    }
};

struct OnDevice {
    OneThread alone;
    int before = fake_on_device(1);
    ~OnDevice() { fake_on_device(before); }
};

struct Inside {
    int before = fake_in_operator(1);
    ~Inside() { fake_in_operator(before); }
};

class Kernel : public c10::OperatorKernel {
   public:
    Kernel(const OperatorHandle& op, Computation computation)
        : cuda_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)), computation_(std::move(computation)) {
        reads_values_ = std::regex_match(op.schema().name(), READS_VALUES);
        is_random_ = op.hasTag(at::Tag::nondeterministic_seeded);
        generator_ = op.schema().argumentIndexWithName("generator");
    }

    void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
        const size_t num = op.schema().arguments().size();
        std::vector<IValue> arguments(stack->end() - long(num), stack->end());
        if (is_in_operator() || is_copy_from_or_to_the_host(op, arguments))
            return cuda_.callBoxed(op, keys, stack);
        TORCH_CHECK(computation_, toString(op.operator_name()), " has no values over the stub of CUDA");
        at::AutoDispatchBelowADInplaceOrView below;
        auto device = device_of(arguments);
        bool is_alone = reads_values_ || has_masks(arguments);
        std::optional<uint64_t> seed;
        if (is_random_)
            seed = next_seed(arguments, device, is_alone);
        void* stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
        if (is_alone) {
            fake_stream_wait(stream);
            return run_alone(op, arguments, seed, device, stack);
        }
        {
            Inside inside;
            cuda_.callBoxed(op, keys, stack);
        }
        Call call{op, {}};
        for (const IValue& value : arguments)
            call.arguments.push_back(shadows_of(value));
        Stack outputs;
        const size_t first = stack->size() - op.schema().returns().size();
        for (size_t i = 0; i < op.schema().returns().size(); i++)
            outputs.push_back(written(op.schema(), i) ? IValue() : shadows_of((*stack)[first + i]));
        auto work = [this, call, outputs, seed]() mutable {
            Stack results = computed(call, seed);
            for (size_t i = 0; i < outputs.size(); i++)
                if (!outputs[i].isNone())
                    copy_into(outputs[i], results[i]);
        };
        fake_stream_do(stream, &Kernel::finish, new std::function<void()>(std::move(work)));
    }

   private:
    // torch copies these by cudaMemcpyAsync, after operators that come here again.
    static bool is_copy_from_or_to_the_host(const OperatorHandle& op, const std::vector<IValue>& arguments) {
        return op.schema().name() == "aten::copy_" &&
               !(arguments[0].toTensor().is_cuda() && arguments[1].toTensor().is_cuda());
    }

    static void finish(void* data) {
        std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(data));
        at::AutoDispatchBelowADInplaceOrView below;
        OneThread alone;
        try {
            (*work)();
        } catch (const c10::Error& error) {
            fake_fail(error.what_without_backtrace());
        } catch (const std::exception& error) {
            fake_fail(error.what());
        }
    }

    Stack computed(Call& call, std::optional<uint64_t> seed) const {
        if (!seed)
            return computation_(call);
        if (generator_) {
            call.arguments[*generator_] = at::detail::createCPUGenerator(*seed);
            return computation_(call);
        }
        auto& global = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
        auto state = global.get_state();
        global.set_current_seed(*seed);
        Stack results = computation_(call);
        global.set_state(state);
        return results;
    }

    // The host has waited, so that sizes may depend on values.
    void run_alone(const OperatorHandle& op, const std::vector<IValue>& arguments, std::optional<uint64_t> seed,
                   c10::Device device, Stack* stack) const {
        OnDevice here;
        Call call{op, {}};
        for (const IValue& value : arguments)
            call.arguments.push_back(shadows_of(value));
        Stack results = computed(call, seed);
        stack->erase(stack->end() - long(arguments.size()), stack->end());
        for (size_t i = 0; i < arguments.size(); i++) {
            auto* alias = op.schema().arguments()[i].alias_info();
            if (!alias || !alias->isWrite() || !arguments[i].isTensor())
                continue;
            Tensor given = arguments[i].toTensor(), made = call.arguments[i].toTensor();
            if (given.sizes() != made.sizes()) {  // an output that the kernel made larger
                given.resize_(made.sizes());
                copy_into(shadow_of(given), made);
            }
        }
        for (size_t i = 0; i < results.size(); i++) {
            auto argument = written(op.schema(), i);
            stack->push_back(argument ? arguments[*argument] : mapped(results[i], [&](const Tensor& result) {
                Tensor made = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
                copy_into(shadow_of(made), result);
                return made;
            }));
        }
    }

    // From the CUDA generator's seed and offset, which torch saves and restores, so that replays draw the same.
    uint64_t next_seed(const std::vector<IValue>& arguments, c10::Device device, bool advances) const {
        bool is_given = generator_ && arguments[*generator_].isGenerator();
        at::Generator generator =
            is_given ? arguments[*generator_].toGenerator() : at::cuda::detail::getDefaultCUDAGenerator(device.index());
        std::lock_guard<std::mutex> lock(generator.mutex());
        uint64_t seed = generator.current_seed(), offset = generator.get_offset();
        if (advances)
            generator.set_offset(offset + 4);
        uint64_t mixed = (seed + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9 ^ (offset + 1) * 0x94d049bb133111eb;
        return mixed ^ mixed >> 31;
    }

    c10::SafeKernelFunction cuda_;
    Computation computation_;
    bool reads_values_, is_random_;
    std::optional<int> generator_;
};

bool makes_a_view(const c10::FunctionSchema& schema) {
    for (const auto& value : schema.returns())
        if (value.alias_info() && !value.alias_info()->isWrite())
            return true;
    return false;
}

// What gives an operator its values; empty if nothing does.
Computation computation_of(const OperatorHandle& op) {
    for (const auto& [names, computation] : SPECIAL)
        if (std::regex_match(toString(op.operator_name()), names))
            return computation;
    return op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) ? on_cpu : Computation();
}

struct Silence : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// Never destroyed: the registrations live as long as the process.
int replace_kernels() {
    static auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    Silence silence;  // torch warns of each kernel that is replaced
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    int num = 0;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        auto op = c10::Dispatcher::singleton().findSchema(name);
        if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CUDA))
            continue;
        Computation computation = computation_of(*op);
        bool is_replaced = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !makes_a_view(op->schema()) &&
                           !std::regex_match(name.name, HAS_NO_VALUES);
        bool is_copy = toString(name) == "aten::copy_";  // has one kernel for all devices
        if (!is_replaced && !is_copy)
            continue;
        auto kernel = std::make_unique<Kernel>(*op, std::move(computation));
        library.impl(toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
        num++;
    }
    fake_values_are_on();
    return num;
}

const int NUM_REPLACED = replace_kernels();

}  // namespace
